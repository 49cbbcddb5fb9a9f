"""Fine-tunes MiniLM with DDP on ranks that are not equally fast: slow ones lower some operators.

    torchrun --nproc-per-node 2 train_unequal_ranks.py
    torchrun --nproc-per-node 2 train_unequal_ranks.py --traces report/traces
    qsync diagnose report/traces/rank*.json.gz

Without torchrun one rank trains alone. Put your model, batches and loss function in place of MiniLM's.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

import qsync
from qsync.data import classify, load_bible_books, load_minilm
from qsync.diagnosis.traces.recording import record_steps
from shared.comms import init_from_env


def main() -> None:
    """Plans on all ranks together, then trains; traces steps if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--batch-size", type=int, default=8, help="passages of a rank's batch")
    parser.add_argument("--traces", type=Path, help="folder for a trace of each rank")
    arguments = parser.parse_args()
    group = init_from_env() if "RANK" in os.environ else None
    rank = 0 if group is None else group.rank
    torch.set_num_threads(1)  # ranks of one host share its cores

    torch.manual_seed(0)  # all ranks start with the same classifier
    model = load_minilm(10)
    batches, _ = load_bible_books(
        10, length=arguments.length, batch_size=arguments.batch_size, seed=rank
    )
    plan = qsync.plan(model, batches, classify, precisions=("fp32", "bf16", "int8"))
    if rank == 0:
        print(plan.explain())
    qsync.apply(model, plan)
    ddp = model if group is None else qsync.DDP(model)

    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-4)
    samples = iter(batches)

    def run_step() -> float:
        optimizer.zero_grad()
        loss = classify(ddp, next(samples))
        loss.backward()
        optimizer.step()
        return loss.item()

    for step in range(arguments.steps):
        loss = run_step()
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}")
    if arguments.traces is not None:
        record_traces(run_step, arguments.traces / f"rank{rank}.json.gz", arguments.steps)


def record_traces(run_step: Callable[[], object], path: Path, num_steps: int) -> None:
    """Records this rank's steps for `qsync diagnose`."""
    record_steps(run_step, path, num_steps=num_steps)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
