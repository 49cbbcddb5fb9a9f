"""Trains a U-Net to prefer one image of each pair, against a frozen reference: a job of one's own.

    torchrun --nproc-per-node 2 train_preferences.py
    torchrun --nproc-per-node 2 train_preferences.py --placement folded --steps 20

After "Diffusion Model Alignment Using Direct Preference Optimization" (arXiv 2311.12908): both images
of a pair get the same noise, and the loss rewards a backbone that denoises the preferred one better
than the reference does, compared with the other. The reference trains nothing and reads noisy latents
only, so it runs in idle time, as encoders do. The backbone gets two rows a sample.
"""

import argparse
import copy
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor
from torch.nn import functional

import diffusionpipe as dp
from diffusionpipe.data import build_unet, iterate_batches, load_digits
from shared.comms import init_from_env
from shared.topology import Cluster

# How strongly to prefer.
BETA = 50.0


def build(batch_size: int = 16) -> tuple[dp.Job, Iterator[dict[str, Any]]]:
    """Builds the job and its batches: sharp digits are preferred to noisy ones, by their label."""
    torch.manual_seed(0)
    unet = build_unet((16, 32), text_dim=16, sample_size=8, in_channels=1, out_channels=1)
    reference = copy.deepcopy(unet).requires_grad_(False)
    labels = torch.nn.Embedding(10, 16).requires_grad_(False)
    scheduler: Any = DDPMScheduler()

    def make_inputs(batch: Mapping[str, Any], frozen: Mapping[str, Any], draw: Any) -> dict:
        pairs = batch["pairs"]  # [num_samples, 2, 1, 8, 8], the preferred image first
        noise = draw.normal(pairs.shape[2:], like=pairs)[:, None].expand_as(pairs).flatten(0, 1)
        times = draw.integers(0, scheduler.config.num_train_timesteps).repeat_interleave(2)
        return {
            "sample": scheduler.add_noise(pairs.flatten(0, 1), noise, times),
            "timestep": times,
            "encoder_hidden_states": frozen["label"].repeat_interleave(2, dim=0),
            "target": (noise, frozen.get("reference")),
        }

    def compute_reference(batch: Mapping[str, Any], frozen: Mapping[str, Any], draw: Any) -> Tensor:
        keywords = make_inputs(batch, frozen, draw)
        noise, _ = keywords.pop("target")
        return measure_errors(reference(**keywords).sample, noise)

    def prefer(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        noise, reference_errors = target
        gain = (measure_errors(output, noise) - reference_errors).diff(dim=1).flatten()
        return -functional.logsigmoid(0.5 * BETA * gain)

    frozen = {
        "label": lambda batch: labels(batch["labels"])[:, None],
        "reference": compute_reference,  # of (batch, frozen, draw): gets what stands before it
    }
    job = dp.Job(dp.chain(unet), frozen, make_inputs, prefer)
    digits = load_digits(8)
    sharp = digits["pixels"][:, :1]
    pairs = torch.stack([sharp, sharp + 0.5 * torch.randn_like(sharp)], dim=1)
    return job, iterate_batches({"pairs": pairs, "labels": digits["labels"]}, batch_size)


def measure_errors(output: Tensor, noise: Tensor) -> Tensor:
    """Each image's mean squared error: [num_samples, 2]."""
    return (output - noise).square().flatten(1).mean(1).unflatten(0, (-1, 2))


def main() -> None:
    """Plans for the ranks of torchrun, or for this process, and trains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--placement", help="data, chain or folded; the fastest if left out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("report/diffusionpipe/preferring"))
    arguments = parser.parse_args()
    rank = init_from_env().rank if "RANK" in os.environ else 0
    torch.set_num_threads(1)  # ranks of one host share its cores

    job, batches = build()
    profile = dp.profile(job, next(batches))
    plan = dp.plan(job, profile, Cluster.detect(), batch_size=16, placement=arguments.placement)
    engine = dp.Engine(job, plan, optimizer=lambda p: torch.optim.AdamW(p, 1e-3), seed=0)
    for step, loss in enumerate(engine.steps(islice(batches, arguments.steps))):
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}")
    engine.export(arguments.out)


if __name__ == "__main__":
    main()
