"""Measures how long this machine takes for each unit of a step's work, by the kernels that it uses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from heta.graph.edges import RelationEdges
from heta.partitioning.workload import FLOAT_BYTES, NUM_MOMENTS, StepRates
from shared.kernels.neighbors import relabel, sample
from shared.kernels.row_adam import step
from shared.kernels.segment import CSR, aggregate

__all__ = ["measure_rates"]

# A step of middling width.
_FANOUT = 10
_WIDTH = 64
_REPEATS = 5


def measure_rates(num_nodes: int = 200_000, num_rows: int = 20_000) -> StepRates:
    """Measures the rates of one rank with this process's threads, in a few seconds.

    What packing, a collective and a step cost besides needs ranks: those keep their defaults.

    Args:
        num_nodes: rows of a table; more than caches hold.
        num_rows: rows that a step computes.

    Returns:
        The rates, each the least of five runs after one that compiles.
    """
    random = torch.Generator().manual_seed(0)
    indptr = torch.arange(num_nodes + 1) * 2 * _FANOUT
    ids = torch.randint(num_nodes, (2 * _FANOUT * num_nodes,), generator=random)
    graph = CSR(indptr, ids.int(), num_nodes)
    rows = torch.randperm(num_nodes, generator=random)[:num_rows]
    scratch = torch.full((num_nodes,), -1, dtype=torch.int32)
    table = torch.randn(num_nodes, _WIDTH, generator=random)

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        starts, entries = sample(graph, rows, _FANOUT, 1)
        return starts, *relabel(graph.indices[entries].long(), num_nodes, rows[:0], scratch)

    starts, inputs, positions = draw()
    num_edges = len(positions)
    x = table[inputs].requires_grad_()
    means = torch.randn(num_rows, _WIDTH, generator=random)
    weight = torch.randn(_WIDTH, _WIDTH, generator=random)
    first, second = torch.zeros_like(table), torch.zeros_like(table)
    counts = torch.zeros(num_nodes, dtype=torch.int32)
    grads = torch.randn(num_rows, _WIDTH, generator=random)
    row_bytes = _WIDTH * FLOAT_BYTES

    def aggregate_both_ways() -> None:
        # Made anew, as in each step: the way back transposes the edges.
        edges = RelationEdges(starts, positions, len(inputs))
        torch.autograd.grad(aggregate(edges.csr, x, reduce="mean"), x, means)

    def update() -> None:
        step(table, first, second, counts, rows, grads, lr=0.01)

    updated_bytes = (1 + NUM_MOMENTS) * num_rows * row_bytes
    return StepRates(
        sampled_edge_s=_time(draw) / num_edges,
        gathered_byte_s=_time(lambda: table[inputs]) / (len(inputs) * row_bytes),
        aggregated_byte_s=_time(aggregate_both_ways) / (2 * num_edges * row_bytes),
        flop_s=_time(lambda: means @ weight) / (2 * num_rows * _WIDTH * _WIDTH),
        module_s=_time(_call_module),
        updated_byte_s=_time(update) / updated_bytes,
    )


def _call_module() -> None:
    """Runs one relation's mean and product on one row, both ways, and their optimizer."""
    edges = RelationEdges(torch.tensor([0, 1]), torch.tensor([0]), 1)
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
