"""Fine-tunes a Stable Diffusion pipeline on digits with captions, in the way that is fastest here.

    torchrun --nproc-per-node 2 train_two_ranks.py
    torchrun --nproc-per-node 2 train_two_ranks.py --placement folded --pipeline ./my-model
    torchrun --nproc-per-node 2 train_two_ranks.py --cluster my.yaml --batch-size 64 --cache report/cache

Without torchrun one process trains alone. Put your images and captions in place of the digits.
"""

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import diffusionpipe as dp
from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
from shared.comms import init_from_env
from shared.topology import Cluster


def build(
    folder: Path | None = None, batch_size: int = 16, image_size: int = 32
) -> tuple[dp.Job, Iterator[dict[str, Any]]]:
    """Builds the job and its batches, the same on every rank; `diffusionpipe profile` calls it too."""
    if folder is None:
        pipeline = build_pipeline(image_size=image_size)
    else:
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(folder)
    return dp.Job.from_pipeline(pipeline), iterate_batches(load_digits(image_size), batch_size)


def main() -> None:
    """Measures, plans, trains and exports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pipeline", type=Path, help="folder of a pipeline; a small one if left out"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for latents and text states; none if left out"
    )
    parser.add_argument("--cluster", type=Path, help="YAML; this machine if left out")
    parser.add_argument("--placement", help="data, chain or folded; the fastest if left out")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step, all ranks'")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("report/diffusionpipe/trained"))
    arguments = parser.parse_args()
    rank = init_from_env().rank if "RANK" in os.environ else 0
    torch.set_num_threads(1)  # ranks of one host share its cores

    job, batches = build(arguments.pipeline, arguments.batch_size, arguments.image_size)
    batch = next(batches)
    if arguments.cache:
        job = dp.cache(job, batch, arguments.cache)
    cluster = Cluster.from_yaml(arguments.cluster) if arguments.cluster else Cluster.detect()
    plan = dp.plan(
        job,
        dp.profile(job, batch),
        cluster,
        batch_size=arguments.batch_size,
        placement=arguments.placement,
    )
    if rank == 0:
        print(plan.explain())
    engine = dp.Engine(job, plan, optimizer=lambda p: torch.optim.AdamW(p, 1e-4), seed=0)
    for step, loss in enumerate(engine.steps(islice(batches, arguments.steps))):
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}")
    engine.export(arguments.out)
    report = engine.report()
    if rank == 0:
        print(report)


if __name__ == "__main__":
    main()
