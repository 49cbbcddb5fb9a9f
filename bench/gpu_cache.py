"""Rows of heta for bench/gpu.py: rows that the GPU reads from pinned memory, and steps with some of them on it."""

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/heta/src"))

import torch

import heta
from gpu_clock import Figure, timed
from heta.rows.cache import CACHE_POLICIES
from heta.training.cache_filling import fill_device
from shared.kernels.gather import gather

__all__ = ["cache_rows"]

BUS_AIM = 0.8
BUDGET = 0.2
"""Of the bytes of all rows and their optimizer's state."""


def cache_rows(
    device: str, num_rows: int, scale: float, batch_size: int, fanouts: list[int], turns: int
) -> list[Figure]:
    """Reading of pinned rows beside a copy, and a step on a graph like ogbn-mag by cache policy.

    Args:
        device: where they run.
        num_rows: of a pinned table of features, an eighth of which is read.
        scale: of the graph.
        batch_size: seeds of a step.
        fanouts: in-edges drawn of a node and relation.
        turns: timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        return [
            _bus_row(device, num_rows, turns),
            *_policy_rows(device, folder, scale, batch_size, fanouts, turns),
        ]


def _bus_row(device: str, num_rows: int, turns: int) -> Figure:
    is_cuda = device == "cuda"
    table = torch.randn(num_rows, 128, pin_memory=is_cuda)
    index = torch.randperm(num_rows)[: num_rows // 8]
    there, out = index.to(device), torch.empty(len(index), 128, device=device)
    block = table[: len(index)].pin_memory() if is_cuda else table[: len(index)].clone()
    times = timed(
        {
            "gather": partial(gather, table, there, out),
            "copy": lambda: out.copy_(block, non_blocking=True),
        },
        turns,
    )
    ours, theirs = (out.nbytes / statistics.median(times[n]) / 1e9 for n in ("gather", "copy"))
    gather(table, there, out)
    return Figure(
        name="gather of pinned rows",
        shape=f"{len(index)} of {num_rows} rows, D = 128, float32",
        unit="GB/s",
        ours=ours,
        baseline=theirs,
        baseline_name="a copy of as many bytes",
        ratio=ours / theirs,
        correct=torch.equal(out.cpu(), table[index]),
        package="heta",
        aim=BUS_AIM,
    )


def _policy_rows(
    device: str, folder: str, scale: float, batch_size: int, fanouts: list[int], turns: int
) -> list[Figure]:
    graph = heta.data.mag_like(scale)
    plan = heta.plan(
        graph, parts=1, strategy="replicate", uses_dst=False, fanouts=fanouts, batch_size=batch_size
    )
    plan.write(graph, folder)
    part = heta.load(folder, 0)
    seeds = part.seeds("train")[: 8 * batch_size]
    trainers: dict[str, Any] = {
        name: _make_trainer(device, part, fanouts) for name in ("none", *CACHE_POLICIES)
    }
    tables = trainers["none"].store.tables.values()
    num_bytes = sum(v.nbytes for table in tables for v in (table.rows, *table.state.values()))
    for name in CACHE_POLICIES:
        store = trainers[name].store
        fill_device(store, part, heta.Cache(int(BUDGET * num_bytes), name), seeds, fanouts, seed=0)
    losses: dict[str, list[float]] = {name: [] for name in trainers}

    def step(name: str) -> None:
        trainer = trainers[name]
        trainer.step_number = len(losses[name])
        first = trainer.step_number * batch_size % len(seeds)
        losses[name].append(trainer.step(seeds[first : first + batch_size]))

    times = timed({name: partial(step, name) for name in trainers}, turns)
    for trainer in trainers.values():
        trainer.close()
    median_s = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        Figure(
            name=f"step with a cache by {name}",
            shape=f"mag_like({scale}), {batch_size} seeds, {BUDGET:.0%} of the rows' bytes",
            unit="ms",
            ours=median_s[name] * 1e3,
            baseline=median_s["none"] * 1e3,
            baseline_name="all rows on the host",
            ratio=median_s["none"] / median_s[name],
            correct=bool(
                torch.allclose(
                    torch.tensor(losses[name][:4]), torch.tensor(losses["none"][:4]), rtol=1e-3
                )
            ),
            note=f"saves {(median_s['none'] - median_s[name]) * 1e3:.2f} ms a step",
            package="heta",
        )
        for name in CACHE_POLICIES
    ]


def _make_trainer(device: str, part: heta.Part, fanouts: list[int]) -> heta.Trainer:
    torch.manual_seed(0)
    model = heta.nn.RGCN(part, part.hidden, part.num_classes).to(device)
    return heta.Trainer(part, model, fanouts)
