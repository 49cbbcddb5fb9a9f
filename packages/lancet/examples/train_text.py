"""Train a small Qwen3-MoE on text, its experts divided over the ranks.

torchrun --nproc-per-node 2 packages/lancet/examples/train_text.py
"""

from itertools import islice
from pathlib import Path

import torch

import lancet
from lancet.data import build_qwen3_moe, load_text_batches
from shared.comms import Group, init_from_env

OUT = Path("report/lancet/model")


def build() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """For `lancet profile` and `lancet bench`: a model and a batch."""
    return build_qwen3_moe(), next(load_text_batches(2, 64, seed=Group.world().rank))


def main() -> None:
    group = init_from_env()
    model = build_qwen3_moe()
    lancet.parallelize(model, group)
    backend = lancet.Backend(group)
    step = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number, batch in enumerate(islice(load_text_batches(2, 64, seed=group.rank), 10)):
        loss = step(**batch).loss
        loss.backward()
        norm = lancet.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if group.rank == 0:
            print(f"step {number}: loss {loss:.3f}, gradient norm {norm:.2f}")
    if group.rank == 0:
        print(backend.report())
    lancet.export(model, OUT)


if __name__ == "__main__":
    main()
