"""Documents into micro-batches, so that a replica's pipeline ends soonest.

After stage 2 of Hydraulis (arXiv 2412.07894), whose published planner solves a program for each number
of micro-batches and takes the closed form of a pipeline of equal ones. Here unequal micro-batches are
timed pass by pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from hydraulis.config import Cost, SequenceTooLong, check_lengths
from hydraulis.planner.assignment import AssignmentProblem, assign
from hydraulis.planner.pipeline import pipeline_s
from shared.errors import ConfigError

__all__ = ["Packing", "assign_evenly", "pack"]

_MOST_COUNTS = 16
"""Numbers of micro-batches that are tried."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Micro-batches of one replica.

    Attributes:
        micro_batches: indices of the documents in each, in the order in which they run.
        max_s: seconds of the largest without its fixed part; the least for so many micro-batches.
        time_s: seconds of the pipeline, see `pipeline_s`.
        upper_s: seconds if all micro-batches took as long as the largest.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    max_s: float
    time_s: float
    upper_s: float


def pack(lengths: Sequence[float] | np.ndarray, cost: Cost, cap: int, stages: int = 1) -> Packing:
    """Packs documents so that a replica's pipeline ends soonest, choosing the number of micro-batches too.

    Stage 2 of Hydraulis (arXiv 2412.07894), with unequal micro-batches timed pass by pass.

    Args:
        lengths: tokens of the documents.
        cost: seconds of a micro-batch on a stage.
        cap: most tokens in a micro-batch.
        stages: pipeline stages.

    Returns:
        The documents of each micro-batch in the order in which they run, and the pipeline's seconds.

    Raises:
        SequenceTooLong: a document exceeds the cap.
        ConfigError: a length is not a whole number above 0, or cap or stages are below 1.
    """
    known = check_lengths(lengths)
    if cap < 1 or stages < 1:
        raise ConfigError(f"pack: expected a cap and stages of at least 1, got {cap} and {stages}")
    if not known.size:
        return Packing(micro_batches=(), max_s=0.0, time_s=0.0, upper_s=0.0)
    if known.max() > cap:
        raise SequenceTooLong(int(known.argmax()), int(known.max()), cap)
    best: Packing | None = None
    fewest = -(-int(known.sum()) // cap)
    for count in _counts(known, cost, fewest, stages):
        # So few may not fit, cut as they are; one more always does in the end.
        if best is not None and count <= len(best.micro_batches):
            continue
        found = None
        while found is None:
            found = _pack_into(known, cost, cap, stages, count)
            count += 1
        # More micro-batches for the same time are of no use.
        if best is None or found.time_s < best.time_s * (1 - 1e-12):
            best = found
        elif stages == 1:
            break
    assert best is not None, "there is at least one number to try"
    return best


def _counts(lengths: np.ndarray, cost: Cost, fewest: int, stages: int) -> list[int]:
    """Numbers of micro-batches worth a try, from the fewest that may fit.

    With S seconds in all, warm-up takes (stages - 1) S / v beside c v: least at v = sqrt((stages - 1)
    S / c), and no more micro-batches help once the longest document is the largest of them.
    """
    if stages == 1:
        return [fewest]
    seconds = cost.sequence_s(lengths)
    total, longest = float(seconds.sum()), float(seconds.max())
    most = min(len(lengths), ceil(total / longest) + 1)
    if cost.c:
        most = min(most, ceil(sqrt((stages - 1) * total / cost.c)) + 1)
    most = max(most, fewest)
    return sorted({round(one) for one in np.linspace(fewest, most, _MOST_COUNTS)})


def assign_evenly(lengths: np.ndarray, cost: Cost, cap: int, count: int) -> np.ndarray | None:
    """Assigns documents to micro-batches so that the longest of these takes the least time.

    Args:
        lengths: tokens of each document.
        cost: seconds of a document.
        cap: most tokens of a micro-batch.
        count: number of micro-batches.

    Returns:
        The micro-batch of each document; None where the search finds no packing.
    """
    seconds = cost.sequence_s(lengths)
    return assign(
        AssignmentProblem(
            seconds=np.ascontiguousarray(np.broadcast_to(seconds[:, None], (len(lengths), count))),
            warm_up=np.zeros(count),
            fits=np.ones((len(lengths), count), dtype=bool),
            tokens=lengths.astype(float),
            room=np.full(count, float(cap)),
        )
    )


def _pack_into(
    lengths: np.ndarray, cost: Cost, cap: int, stages: int, count: int
) -> Packing | None:
    """The packing into so many micro-batches with the least largest one; None if none fits."""
    seconds = cost.sequence_s(lengths)
    found = assign_evenly(lengths, cost, cap, count)
    if found is None:
        return None
    groups = [np.flatnonzero(found == number) for number in range(count)]
    groups = [group for group in groups if group.size]
    sums = np.array([float(seconds[group].sum()) for group in groups])
    order, time_s = _order(sums + cost.c, stages)
    return Packing(
        micro_batches=tuple(tuple(groups[number].tolist()) for number in order),
        max_s=float(sums.max()),
        time_s=time_s,
        upper_s=float((sums.max() + cost.c) * (stages - 1 + len(groups))),
    )


def _order(micro_batch_s: np.ndarray, stages: int) -> tuple[np.ndarray, float]:
    """The order that ends soonest of a few: as a pipeline fills and drains, short ones cost least."""
    rising = np.argsort(micro_batch_s, kind="stable")
    peaked = np.concatenate((rising[::2], rising[1::2][::-1]))
    orders = [rising[::-1]] if stages == 1 else [rising[::-1], rising, peaked]
    timed = [(pipeline_s(micro_batch_s[order], stages), order) for order in orders]
    seconds, order = min(timed, key=lambda one: one[0])
    return order, seconds
