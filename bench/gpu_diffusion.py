"""Rows of diffusionpipe for bench/gpu.py: SD 2.1's frozen part beside its U-Net, by seconds and by operations; peak memory.

The models have SD 2.1's configurations and random weights, in bf16. Both parts are timed in turns on the same
samples; their operations are counted while they run. Memory is what a plan for one device predicts beside what
torch allocates while the engine trains by it. A rehearsal has small models, and no memory to measure.
"""

import sys
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/diffusionpipe/src"))

import torch

import diffusionpipe as dp
from gpu_clock import Figure, timed
from shared.topology import Cluster
from shared.topology.device import H200

__all__ = ["diffusion_rows"]

PEAK_AIM, RATIO_AIM = 0.95, None
STEPS = 3


def build_job(device: str, *, is_small: bool) -> dp.Job:
    """SD 2.1's training job, or one of small configurations."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet_sizes: dict[str, Any] = {
        "sample_size": 64, "attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024,
        "use_linear_projection": True,
    }  # fmt: skip
    vae_channels, text_sizes = (128, 256, 512, 512), (1024, 4096, 23, 16)
    if is_small:
        unet_sizes |= {
            "sample_size": 4, "attention_head_dim": 4, "cross_attention_dim": 16,
            "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        }  # fmt: skip
        vae_channels, text_sizes = (8, 8, 8, 8), (16, 32, 2, 2)
    hidden, inner, layers, heads = text_sizes
    blocks = len(vae_channels)
    unet: Any = UNet2DConditionModel(**unet_sizes)
    vae: Any = AutoencoderKL(
        block_out_channels=vae_channels, down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks, latent_channels=4,
        layers_per_block=2, norm_num_groups=4 if is_small else 32,
    )  # fmt: skip
    texts: Any = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, projection_dim=hidden,
        )
    )  # fmt: skip
    for model in (unet, vae, texts):
        model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    vae.requires_grad_(False).eval()
    texts.requires_grad_(False).eval()

    def encode_pixels(batch: Any) -> torch.Tensor:
        return vae.encode(batch["pixels"].to(device, vae.dtype)).latent_dist.parameters

    def encode_ids(batch: Any) -> torch.Tensor:
        return texts(batch["ids"].to(device))[0]

    inputs, loss = dp.losses.epsilon(DDPMScheduler(), latents="z", text="h")
    return dp.Job(dp.chain(unet), {"z": encode_pixels, "h": encode_ids}, inputs, loss)


def make_batch(num_rows: int, *, is_small: bool) -> dict[str, torch.Tensor]:
    """Pixels and ids of tokens."""
    size, generator = 32 if is_small else 512, torch.Generator().manual_seed(1)
    return {
        "pixels": torch.rand(num_rows, 3, size, size, generator=generator) * 2 - 1,
        "ids": torch.randint(0, 1000, (num_rows, 77), generator=generator),
    }


def count_operations(run: Any) -> int:
    """Floating-point operations of a call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def compare_ratios(job: dp.Job, batch: dict[str, torch.Tensor], turns: int, shape: str) -> Figure:
    """The frozen part over the trained part: seconds beside operations."""
    num_rows = job.num_samples(batch)
    draw = dp.Draw(0, 0, range(num_rows))

    def encode() -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for component in job.components:
            values |= job.encode(component, batch, draw)
        return values

    prepared = job.prepare(batch, encode(), draw)[0]
    model = job.chains[0].model

    def train() -> None:
        output = job.chains[0].run(prepared.state)["output"]
        job.compute_losses(output, prepared.target, num_rows).mean().backward()

    train()
    has_gradients = all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()
    )
    seconds = timed({"frozen": encode, "trained": train}, turns)
    measured = median(seconds["frozen"]) / median(seconds["trained"])
    counted = count_operations(encode) / count_operations(train)
    model.zero_grad(set_to_none=True)
    return Figure(
        name="frozen over trained part of SD 2.1, seconds", shape=shape, unit="ratio", ours=measured,
        baseline=counted, baseline_name="operations", ratio=min(measured / counted, counted / measured),
        correct=has_gradients and measured > 0, package="diffusionpipe", aim=RATIO_AIM,
        note=f"{median(seconds['frozen']):.4f} and {median(seconds['trained']):.4f} s",
    )  # fmt: skip


def compare_peaks(job: dp.Job, batch: dict[str, torch.Tensor], count: int, shape: str) -> Figure:
    """The plan's most memory beside what torch allocates while the engine trains by it."""
    num_rows = job.num_samples(batch)
    profile = dp.profile(job, batch, sizes=(num_rows // count,), repeats=1)
    plan = dp.plan(
        job, profile, Cluster.uniform(1, 1, H200), batch_size=num_rows, num_stages=1,
        num_micro_batches=count,
    )  # fmt: skip
    engine = dp.Engine(job, plan, lambda p: torch.optim.AdamW(p, 1e-4))
    torch.cuda.reset_peak_memory_stats()
    losses = list(engine.steps([batch] * STEPS))
    measured, predicted = torch.cuda.max_memory_allocated(), plan.ranks[0].peak_bytes
    return Figure(
        name=f"peak of a step of SD 2.1, {count} micro-batches", shape=shape, unit="GB",
        ours=predicted / 1e9, baseline=measured / 1e9, baseline_name="measured",
        ratio=min(measured / predicted, predicted / measured),
        correct=all(map(isfinite, losses)) and len(set(losses)) == STEPS and measured > 0, package="diffusionpipe", aim=PEAK_AIM,
    )  # fmt: skip


def diffusion_rows(device: str, num_rows: int, turns: int) -> list[Figure]:
    """Seconds beside operations, and on a GPU peaks of whole and of divided batches."""
    is_small = device == "cpu"
    batch = make_batch(num_rows, is_small=is_small)
    shape = f"{num_rows} samples of {batch['pixels'].shape[-1]} pixels"
    rows = [compare_ratios(build_job(device, is_small=is_small), batch, turns, shape)]
    if not is_small:
        for count in (1, 2):
            torch.cuda.empty_cache()
            # An engine takes the weights of its job.
            rows.append(compare_peaks(build_job(device, is_small=False), batch, count, shape))
    return rows
