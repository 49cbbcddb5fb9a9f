"""Plans the precisions of one device: the step that you ask for, at the least gradient error.

    python lower_one_device.py
    python lower_one_device.py --target-time 0.7x --steps 20

The same job on the command line: `qsync plan --build lower_one_device.py:build --target-time 0.8x`.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch

import qsync
from qsync.config import TrainingJob
from qsync.data import ResNet8, classify, load_digit_images


def build() -> TrainingJob:
    """Builds a model, its batches and its loss function of (model, batch)."""
    torch.manual_seed(0)
    train, _ = load_digit_images(batch_size=64)
    return TrainingJob(ResNet8(), train, classify)


def main() -> None:
    """Plans, shows what the gradient error is made of, and trains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target-time", default="0.8x", help="of float32's step, or in seconds")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("report/qsync/one_device.json"))
    arguments = parser.parse_args()

    model, batches, loss_fn = build()
    plan = qsync.plan(model, batches, loss_fn, target_time=arguments.target_time)
    print(plan.explain())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plan.save(arguments.out)

    qsync.apply(model, plan)  # parameters stay float32: an optimizer made before would do too
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step, batch in enumerate(islice(batches, arguments.steps)):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
