"""Measures how long this machine takes for each unit of a step's work, by the kernels that it uses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from heta.graph.edges import Edges
from heta.partitioning.workload import FLOAT_BYTES, NUM_MOMENTS, StepRates
from shared.kernels.neighbors import relabel, sample
from shared.kernels.row_adam import step
from shared.kernels.segment import CSR, aggregate

__all__ = ["measure_rates"]

# Sizes of a middling step: large enough that tables do not fit into caches.
_NUM_NODES = 200_000
_NUM_ROWS = 20_000
_FANOUT = 10
_WIDTH = 64
_REPEATS = 5


def measure_rates() -> StepRates:
    """Measures the rates of one rank with this process's threads, in a few seconds.

    What a collective and a step cost besides their work needs ranks: those keep their defaults.

    Returns:
        The rates, each the least of five runs after one that compiles.
    """
    random = torch.Generator().manual_seed(0)
    indptr = torch.arange(_NUM_NODES + 1) * 2 * _FANOUT
    ids = torch.randint(_NUM_NODES, (2 * _FANOUT * _NUM_NODES,), generator=random)
    graph = CSR(indptr, ids.int(), _NUM_NODES)
    rows = torch.randperm(_NUM_NODES, generator=random)[:_NUM_ROWS]
    scratch = torch.full((_NUM_NODES,), -1, dtype=torch.int32)
    table = torch.randn(_NUM_NODES, _WIDTH, generator=random)

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        starts, entries = sample(graph, rows, _FANOUT, 1)
        return starts, *relabel(graph.indices[entries].long(), _NUM_NODES, rows[:0], scratch)

    starts, inputs, positions = draw()
    num_edges = len(positions)
    x = table[inputs].requires_grad_()
    means = torch.randn(_NUM_ROWS, _WIDTH, generator=random)
    weight = torch.randn(_WIDTH, _WIDTH, generator=random)
    moments = [torch.zeros_like(table) for _ in range(NUM_MOMENTS)]
    counts = torch.zeros(_NUM_NODES, dtype=torch.int32)
    grads = torch.randn(_NUM_ROWS, _WIDTH, generator=random)
    row_bytes = _WIDTH * FLOAT_BYTES

    def aggregate_both_ways() -> None:
        # Made anew, as in each step: the way back transposes the edges.
        edges = Edges(starts, positions, len(inputs))
        torch.autograd.grad(aggregate(edges.csr, x, reduce="mean"), x, means)

    def update() -> None:
        step(table, *moments, counts, rows, grads, lr=0.01)

    updated_bytes = (1 + NUM_MOMENTS) * _NUM_ROWS * row_bytes
    return StepRates(
        sampled_edge_s=_time(draw) / num_edges,
        gathered_byte_s=_time(lambda: table[inputs]) / (len(inputs) * row_bytes),
        aggregated_byte_s=_time(aggregate_both_ways) / (2 * num_edges * row_bytes),
        flop_s=_time(lambda: means @ weight) / (2 * _NUM_ROWS * _WIDTH * _WIDTH),
        module_s=_time(_call_module),
        updated_byte_s=_time(update) / updated_bytes,
    )


def _call_module() -> None:
    """Runs one relation's mean and product on one row, both ways, and their optimizer."""
    edges = Edges(torch.tensor([0, 1]), torch.tensor([0]), 1)
    linear = nn.Linear(_WIDTH, _WIDTH)
    optimizer = torch.optim.Adam(linear.parameters())
    x = torch.zeros(1, _WIDTH, requires_grad=True)
    linear(aggregate(edges.csr, x, reduce="mean")).sum().backward()
    optimizer.step()


def _time(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
