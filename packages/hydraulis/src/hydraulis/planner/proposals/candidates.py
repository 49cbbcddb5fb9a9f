"""Proposes candidates: multisets of replicas, each best for all documents up to some length.

After the offline program of Hydraulis (arXiv 2412.07894): lengths are cut into bands, and each band is
served by copies of one shape. Departures: warm-up is not divided among copies, nor is a document; the
fixed part counts for each micro-batch and not for each document; and the program takes a pass over
ranks where the published one tries every number of copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hydraulis.config import SequenceTooLong, check_lengths
from hydraulis.planner.proposals.bands_compiled import fill_bands, spread_bands
from hydraulis.planner.proposals.shapes import ReplicaShape, exclusions
from shared.errors import ConfigError

__all__ = ["Candidate", "propose"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Replicas that a step may run side by side.

    Attributes:
        shapes: of the replicas, those of most ranks first.
        seconds: predicted for all documents together; infinite if no replica holds the longest.
    """

    shapes: tuple[ReplicaShape, ...]
    seconds: float

    def __str__(self) -> str:
        return "+".join(map(str, self.shapes))


class _Bands(NamedTuple):
    """What `bands_compiled` takes, in its order but for the ranks."""

    work: np.ndarray
    tokens: np.ndarray
    longest_s: np.ndarray
    last: np.ndarray
    fixed_s: np.ndarray
    caps: np.ndarray
    stages: np.ndarray


def propose(
    lengths: Sequence[float] | np.ndarray,
    num_ranks: int,
    shapes: Sequence[ReplicaShape],
    *,
    top: int = 8,
    num_bins: int = 96,
    num_heads: int | None = None,
    num_layers: int | None = None,
) -> tuple[Candidate, ...]:
    """Candidates for steps whose documents are like these; the fastest for all of them first.

    For every length at which bands may be cut, the best replicas for the documents up to it; of them
    the best for all, and then one by one those that lower most the mean predicted slowdown over
    these lengths. Beside them, every shape alone on all ranks. Shapes that cannot run are logged with
    their reason. O(shapes x bins^2 x ranks).

    Args:
        lengths: tokens of the documents of a typical step.
        num_ranks: ranks in all.
        shapes: of replicas, with what they cost.
        top: most candidates of unlike replicas.
        num_bins: lengths at which bands may be cut, beside the caps of shapes.
        num_heads: attention heads of the model; None leaves them unchecked.
        num_layers: layers of the model; None leaves them unchecked.

    Raises:
        SequenceTooLong: no shape that can run holds a document.
        ConfigError: no ranks, documents, candidates or bins, or no shape can run.
    """
    known = check_lengths(lengths)
    if min(num_ranks, known.size, top, num_bins) < 1:
        raise ConfigError(
            f"propose: expected ranks, documents, candidates and bins, got {num_ranks}, {known.size}, "
            f"{top} and {num_bins}"
        )
    left_out = exclusions(shapes, num_ranks, num_heads=num_heads, num_layers=num_layers)
    for shape, reason in left_out.items():
        log.warning("propose: leaves out %s: it %s", shape, reason)
    usable = [shape for shape in dict.fromkeys(shapes) if shape not in left_out]
    if not usable:
        told = "; ".join(f"{shape} {reason}" for shape, reason in left_out.items())
        raise ConfigError(f"propose: expected a shape that can run, got {told or 'none'}")
    most = max(shape.cap for shape in usable)
    if known.max() > most:
        raise SequenceTooLong(int(known.argmax()), int(known.max()), most)
    bands = _cut(known, usable, num_bins)
    ranks = np.array([shape.num_ranks for shape in usable])
    traced, least_s = _trace(bands, ranks, num_ranks)
    alone = [
        tuple(num_ranks // n if at == own else 0 for at in range(len(ranks)))
        for own, n in enumerate(ranks.tolist())
    ]
    unlike = [counts for counts in traced if counts not in alone]
    values = {counts: _predict(bands, counts) for counts in {*unlike, *alone}}
    chosen = alone + _choose(unlike, alone, values, least_s, top)
    found = []
    for counts in chosen:
        mine = [one for one, count in zip(usable, counts, strict=True) for _ in range(count)]
        mine.sort(key=lambda one: (-one.num_ranks, -one.tp, -one.pp, -one.ring))
        found.append(Candidate(shapes=tuple(mine), seconds=float(values[counts][-1])))
    return tuple(sorted(found, key=lambda one: (one.seconds, len(one.shapes))))


def _cut(lengths: np.ndarray, shapes: Sequence[ReplicaShape], num_bins: int) -> _Bands:
    """Sums up to each length at which bands may be cut: bins of as many tokens, and caps."""
    values, counts = np.unique(lengths, return_counts=True)
    summed = np.cumsum(values * counts)
    caps = np.array([shape.cap for shape in shapes])
    marks = np.linspace(0, summed[-1], num_bins + 1)[1:]
    at_caps = np.searchsorted(values, caps, side="right") - 1
    ends = np.unique(np.concatenate((np.searchsorted(summed, marks), at_caps[at_caps >= 0])))
    if len(values) <= num_bins:
        ends = np.arange(len(values))
    alone = np.stack([shape.cost.sequence_s(values) for shape in shapes])
    start = np.zeros((len(shapes), 1))
    return _Bands(
        work=np.concatenate((start, (alone * counts).cumsum(axis=1)[:, ends]), axis=1),
        tokens=np.concatenate(([0], summed[ends])),
        longest_s=np.concatenate((start, alone[:, ends]), axis=1),
        last=np.searchsorted(values[ends], caps, side="right"),
        fixed_s=np.array([shape.cost.c for shape in shapes]),
        caps=caps,
        stages=np.array([shape.pp for shape in shapes]),
    )


def _trace(
    bands: _Bands, ranks: np.ndarray, num_ranks: int
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Replicas of each shape that are best up to each length, the longest first; and their seconds."""
    shape = (len(bands.tokens), num_ranks + 1)
    best = np.empty(shape)
    shape_of, copies_of, low_of = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    fill_bands(*bands[:4], ranks, *bands[4:], best, shape_of, copies_of, low_of)
    found: dict[tuple[int, ...], None] = {}
    for last in range(len(bands.tokens) - 1, 0, -1):
        if not np.isfinite(best[last, num_ranks]):
            continue
        high, left = last, num_ranks
        counts = [0] * len(ranks)
        while high:
            k = int(shape_of[high, left])
            if k < 0:
                left -= 1
                continue
            copies = int(copies_of[high, left])
            counts[k] += copies
            high, left = int(low_of[high, left]), left - copies * int(ranks[k])
        found[tuple(counts)] = None
    return list(found), best[:, num_ranks]


def _predict(bands: _Bands, counts: tuple[int, ...]) -> np.ndarray:
    """Seconds of all documents up to each length on given replicas."""
    kinds = np.flatnonzero(counts)
    return spread_bands(*bands, kinds, np.array(counts)[kinds])


def _choose(
    unlike: list[tuple[int, ...]],
    alone: list[tuple[int, ...]],
    values: dict[tuple[int, ...], np.ndarray],
    least_s: np.ndarray,
    top: int,
) -> list[tuple[int, ...]]:
    """Of candidates, the first, which is best for all documents, and those that add most to it."""
    possible = np.isfinite(least_s) & (least_s > 0)
    slowdown = {counts: values[counts][possible] / least_s[possible] for counts in values}
    reached = np.min([slowdown[counts] for counts in alone], axis=0)
    chosen: list[tuple[int, ...]] = []
    left = list(unlike)
    while left and len(chosen) < top:
        if chosen:
            lowered = [np.minimum(reached, slowdown[counts]).mean() for counts in left]
        else:
            lowered = [values[counts][-1] for counts in left]
        at = int(np.argmin(lowered))
        reached = np.minimum(reached, slowdown[left[at]])
        chosen.append(left.pop(at))
    return chosen
