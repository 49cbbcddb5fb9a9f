"""Changes that may shorten a job's step or its memory, in a registry.

A strategy is a function of an `AdviceState` that yields proposals. It looks only at what lies on the
critical path of the job as changed so far: nothing else can shorten the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qsync.diagnosis.diagnose import Diagnosis
from qsync.diagnosis.what_if import JobChange, JobForecast
from shared.errors import DataError
from shared.registry import Registry
from shared.units import MiB

__all__ = ["STRATEGIES", "AdviceState", "Proposal"]

_PRODUCTS = re.compile(r"linear|addmm|\bmm|bmm|matmul|conv|gemm|MmBackward", re.IGNORECASE)
# Halving an operand's bits halves a product's time at best.
_BEST_SHARE = 0.5
# Smaller buckets have latencies that traces tell badly, so that they must gain more than this.
_ABOUT = 1.02
_BUCKETS_MIB = (1, 2, 5, 10, 25, 50, 100)
_BLOCK_SHARES = (0.25, 0.5, 1.0)


Proposal = tuple[JobChange, str]
"""A change, on top of those chosen so far, and what a user does for it."""


@dataclass(frozen=True, kw_only=True)
class AdviceState:
    """Where a search stands.

    Attributes:
        diagnosis: of the traced job.
        change: what was chosen so far.
        forecast: the job under it.
    """

    diagnosis: Diagnosis
    change: JobChange
    forecast: JobForecast

    @property
    def has_critical_sum(self) -> bool:
        """Whether an all-reduce lies on the critical path."""
        return (None, "allreduce") in self.forecast.critical_s


STRATEGIES: Registry[str, Callable[[AdviceState], Iterator[Proposal]]] = Registry("strategy")


def lower_precision(state: AdviceState) -> Iterator[Proposal]:
    """Lowers products of one rank on the critical path, as far as it is slower than the others."""
    graph, path = state.forecast.graph, state.forecast.critical_s
    totals_s = np.bincount(graph.ranks, graph.gap_s + graph.busy_s)
    for rank in sorted({rank for rank, _ in path if rank is not None}):
        names = sorted({name for other, name in path if other == rank and _PRODUCTS.search(name)})
        if not names or any(other == rank for other, _ in state.change.operator_speed):
            continue
        chosen = (graph.ranks == rank) & np.isin(graph.names, names)
        excess_s = totals_s[rank] - np.delete(totals_s, rank).max()
        share = max(_BEST_SHARE, 1 - float(excess_s / graph.busy_s[chosen].sum()))
        if share >= 1:
            continue
        speeds = {**state.change.operator_speed, **{(rank, name): 1 / share for name in names}}
        text = (
            f"run {', '.join(names)} of rank {rank} in a lower precision, at {share:.0%} of their "
            "time (qsync.plan chooses which)"
        )
        yield replace(state.change, operator_speed=speeds), text


def resize_buckets(state: AdviceState) -> Iterator[Proposal]:
    """Sends gradients in buckets of another size: of those about as fast as the best, the largest."""
    if not state.has_critical_sum or state.change.bucket_bytes:
        return
    options = []
    for size in _BUCKETS_MIB:
        change = replace(state.change, bucket_bytes=size * MiB)
        try:
            forecast = state.diagnosis.job.predict(change)
        except DataError:  # The trace has no sizes.
            return
        if len(forecast.graph.exchanges) != len(state.diagnosis.collectives):
            options.append((size, change, forecast))
    if not options:
        return
    least_s = min(forecast.step_s for _, _, forecast in options)
    size, change, forecast = next(
        option for option in reversed(options) if option[2].step_s <= _ABOUT * least_s
    )
    note = f" ({forecast.note})" if forecast.note else ""
    yield change, f"give DDP bucket_cap_mb={size}{note}"


def halve_gradients(state: AdviceState) -> Iterator[Proposal]:
    """Sends gradients in bf16."""
    if state.has_critical_sum and state.change.gradient_share == 1:
        change = replace(state.change, gradient_share=0.5)
        yield change, "all-reduce gradients in bf16 by a communication hook"


def accumulate(state: AdviceState) -> Iterator[Proposal]:
    """All-reduces gradients of two batches at once."""
    if state.has_critical_sum and state.change.accumulation == 1:
        text = (
            "accumulate gradients of two batches under no_sync: this doubles the global batch, so "
            "that the learning rate has to be chosen anew"
        )
        yield replace(state.change, accumulation=2), text


def recompute(state: AdviceState) -> Iterator[Proposal]:
    """Runs a part of the forward pass twice in place of keeping its activations."""
    for share in _BLOCK_SHARES:
        if share > state.change.recompute_share:
            change = replace(state.change, recompute_share=share)
            yield change, f"recompute {share:.0%} of the blocks (torch.utils.checkpoint)"


def halve_batch(state: AdviceState) -> Iterator[Proposal]:
    """Cuts each batch into twice as many micro-batches."""
    parts = state.change.micro_batches * 2
    change = replace(state.change, micro_batches=parts)
    yield change, f"cut each batch into {parts} micro-batches, under no_sync but for the last"


STRATEGIES.add("precision", lower_precision, "computation: products of a rank in fewer bits")
STRATEGIES.add("buckets", resize_buckets, "communication: other sizes of DDP's buckets")
STRATEGIES.add("bf16 gradients", halve_gradients, "communication: half of the bytes")
STRATEGIES.add("accumulation", accumulate, "communication: half as many all-reduces")
STRATEGIES.add("recompute", recompute, "memory: activations computed again")
STRATEGIES.add("micro-batches", halve_batch, "memory: smaller micro-batches")
