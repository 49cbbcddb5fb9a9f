"""Predicts which all-reduces a step would have with gradients in buckets of another size.

Gradients become ready as the trace's accumulations tell, if shapes were recorded, else evenly
between the moments at which the traced buckets were ready.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from qsync.diagnosis.job_graph import GraphCollective, LanePiece
from shared.errors import DataError
from shared.topology import Link

__all__ = ["is_backward", "rebucket"]

# Parameters without a gradient and padding may differ by this share of the bytes.
_SIZE_TOLERANCE = 0.02
_NUM_PARTS = 256


def is_backward(name: str) -> bool:
    """Whether an operator belongs to the backward pass, by the names that autograd gives."""
    return bool(re.search(r"Backward\d*$|AccumulateGrad$", name))


def rebucket(
    lanes: Sequence[Sequence[LanePiece]],
    exchanges: Sequence[GraphCollective],
    link: Link,
    bucket_bytes: int,
) -> tuple[list[GraphCollective], list[list[tuple[int, ...]]]]:
    """Replaces the all-reduces of each step by those of buckets of `bucket_bytes`.

    Returns:
        The collectives in the order in which they take the link; by rank and piece, the positions
        of those that it waits for.

    Raises:
        DataError: the size of an all-reduce is unknown.
    """
    replaced = [exchange for exchange in exchanges if exchange.kind == "allreduce"]
    if any(exchange.num_bytes is None for exchange in replaced):
        raise DataError(
            "expected the sizes of all all-reduces, got a trace without them; record shapes "
            "(record_shapes=True)"
        )
    made: list[tuple[GraphCollective, int | None]] = [
        (exchange, i) for i, exchange in enumerate(exchanges) if exchange.kind != "allreduce"
    ]
    for step in sorted({exchange.step for exchange in replaced}):
        old = [exchange for exchange in replaced if exchange.step == step]
        curves = [_gradients(lane, rank, step, old) for rank, lane in enumerate(lanes)]
        ends = _fill(curves[0][1], bucket_bytes)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            ready_s = tuple(float(np.interp(end, sizes, times)) for times, sizes in curves)
            seconds = link.time_s(int(end - begin))
            made.append(
                (GraphCollective("allreduce", step, int(end - begin), seconds, ready_s), None)
            )
    made.sort(key=lambda pair: max(pair[0].ready_s))
    kept = {old: new for new, (_, old) in enumerate(made) if old is not None}
    by_step: dict[int, list[int]] = {}
    for i, (exchange, _) in enumerate(made):
        if exchange.kind == "allreduce":
            by_step.setdefault(exchange.step, []).append(i)
    result = [exchange for exchange, _ in made]
    waits = [_wait_anew(lane, rank, exchanges, result, kept, by_step)
             for rank, lane in enumerate(lanes)]  # fmt: skip
    return result, waits


def _fill(sizes: Sequence[float], bucket_bytes: int) -> list[float]:
    """Bytes ready at the end of each bucket, which is sent once it has its bytes."""
    ends = [0.0]
    for size in sizes:
        if size - ends[-1] >= bucket_bytes or size == sizes[-1] > ends[-1]:
            ends.append(size)
    return ends[1:]


def _wait_anew(
    lane: Sequence[LanePiece],
    rank: int,
    old: Sequence[GraphCollective],
    new: Sequence[GraphCollective],
    kept: Mapping[int, int],
    by_step: Mapping[int, list[int]],
) -> list[tuple[int, ...]]:
    """A piece that waited for an all-reduce waits for all new ones that are ready before it."""
    waits = []
    for piece in lane:
        behind: dict[int, None] = {}
        for i in piece.behind:
            if i in kept:
                behind[kept[i]] = None
                continue
            for j in by_step[old[i].step]:
                if new[j].ready_s[rank] <= piece.start_s:
                    behind[j] = None
        waits.append(tuple(behind))
    return waits


def _gradients(
    lane: Sequence[LanePiece], rank: int, step: int, old: Sequence[GraphCollective]
) -> tuple[list[float], list[float]]:
    """When a rank's gradients of a step are ready: times, and bytes ready until then."""
    total = sum(exchange.num_bytes or 0 for exchange in old)
    mine = [piece for piece in lane if piece.step == step]
    grown = [p for p in mine if p.name.endswith("AccumulateGrad") and p.num_bytes and p.busy_s]
    grown_bytes = np.cumsum([piece.num_bytes or 0 for piece in grown])
    if len(grown) and abs(grown_bytes[-1] - total) <= _SIZE_TOLERANCE * total:
        times = [piece.start_s for piece in grown]
        return [times[0], *times], [0.0, *(grown_bytes * (total / grown_bytes[-1])).tolist()]
    ordered = sorted(old, key=lambda exchange: exchange.ready_s[rank])
    times = [exchange.ready_s[rank] for exchange in ordered]
    sizes = np.cumsum([exchange.num_bytes or 0 for exchange in ordered]).tolist()
    begin_s = next((piece.start_s for piece in mine if is_backward(piece.name)), times[0])
    # Unknown gradients are taken as equal parts, fine enough for any bucket that is worth sending.
    parts = np.linspace(0.0, float(sizes[-1]), _NUM_PARTS + 1)
    ready = np.interp(parts, [0.0, *sizes], [min(begin_s, times[0]), *times])
    return ready.tolist(), parts.tolist()
