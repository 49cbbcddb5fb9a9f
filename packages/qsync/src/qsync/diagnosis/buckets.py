"""Predicts which all-reduces a step would have with gradients in buckets of another size.

Gradients become ready as the trace's accumulations tell, if shapes were recorded, else evenly
between the moments at which the traced buckets were ready.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

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
) -> tuple[list[list[LanePiece]], list[GraphCollective]]:
    """Replaces the all-reduces of each step by those of buckets of `bucket_bytes`.

    Returns:
        The lanes, waiting for new collectives in place of old ones, and these in the order in which
        they take the link.

    Raises:
        DataError: the size of an all-reduce is unknown.
    """
    sums = [exchange for exchange in exchanges if exchange.kind == "allreduce"]
    if any(exchange.num_bytes is None for exchange in sums):
        raise DataError(
            "expected the sizes of all all-reduces, got a trace without them; record shapes "
            "(record_shapes=True)"
        )
    new = [exchange for exchange in exchanges if exchange.kind != "allreduce"]
    for step in sorted({exchange.step for exchange in sums}):
        old = [exchange for exchange in sums if exchange.step == step]
        curves = [_gradients(lane, rank, step, old) for rank, lane in enumerate(lanes)]
        for begin, end in pairwise(_fill(curves[0][1], bucket_bytes)):
            ready_s = tuple(float(np.interp(end, sizes, times)) for times, sizes in curves)
            seconds = link.time_s(int(end - begin))
            new.append(GraphCollective("allreduce", step, int(end - begin), seconds, ready_s))
    new.sort(key=lambda exchange: max(exchange.ready_s))
    positions = {id(exchange): i for i, exchange in enumerate(new)}

    def wait_anew(rank: int, piece: LanePiece) -> LanePiece:
        """Lets a piece that waited for an all-reduce wait for all that are ready before it."""
        before = [exchanges[i] for i in piece.behind]
        steps = {exchange.step for exchange in before if exchange.kind == "allreduce"}
        kept = [positions[id(e)] for e in before if e.kind != "allreduce"]
        made = [
            i
            for i, exchange in enumerate(new if steps else [])
            if exchange.kind == "allreduce" and exchange.step in steps
            and exchange.ready_s[rank] < piece.start_s
        ]  # fmt: skip
        return piece._replace(behind=(*kept, *made))

    return [[wait_anew(rank, piece) for piece in lane] for rank, lane in enumerate(lanes)], new


def _fill(sizes: Sequence[float], bucket_bytes: int) -> list[float]:
    """Bytes ready at the borders of buckets, each of which is sent once it has its bytes."""
    borders = [0.0]
    for size in sizes:
        if size - borders[-1] >= bucket_bytes or size == sizes[-1] > borders[-1]:
            borders.append(size)
    return borders


def _gradients(
    lane: Sequence[LanePiece], rank: int, step: int, old: Sequence[GraphCollective]
) -> tuple[list[float], list[float]]:
    """When a rank's gradients of a step are ready: times, and bytes ready until then."""
    total = sum(exchange.num_bytes or 0 for exchange in old)
    mine = [piece for piece in lane if piece.step == step]
    grown = [p for p in mine if p.name.endswith("AccumulateGrad") and p.num_bytes]
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
