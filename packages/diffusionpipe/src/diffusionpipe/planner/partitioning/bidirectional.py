"""Stages in pairs, one from the front and one from the back on each device.

Two backbones of a cascade run in opposite directions over the same devices (after DiffusionPipe,
section 4.3). One backbone is folded in the same way: a device holds a span and its mirror, so that
both ends of most skips meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diffusionpipe.planner.partitioning.partition import check_chain, sum_spans
from diffusionpipe.planner.partitioning.partition_compiled import pair_stages

__all__ = [
    "PairMemory",
    "PairedPartition",
    "fold_stages",
    "pair_spans",
    "partition_bidirectional",
]

ChainSeconds = Sequence[Sequence[float] | np.ndarray] | np.ndarray


@dataclass(frozen=True, slots=True)
class PairedPartition:
    """Stages of two chains over the same devices.

    Attributes:
        down, up: by stage of each chain, the first layer and the one after the last. Device d holds
            stage d of `down` and stage S - 1 - d of `up`.
        objective_s: (M + 2S - 2) W in seconds.
        period_s: W, the seconds of the longest device or used cut.
    """

    down: list[tuple[int, int]]
    up: list[tuple[int, int]]
    objective_s: float
    period_s: float


class PairMemory(NamedTuple):
    """Memory of devices that hold a span from the front, "down", and one from the back, "up".

    Tables are [i, j], of layers i to j.

    Attributes:
        down_bytes, up_bytes: bytes that layers need whatever is computed.
        down_flight_bytes, up_flight_bytes: bytes that a micro-batch in flight keeps there.
        down_flights, up_flights: by device, micro-batches in flight.
        takes_turns: never are micro-batches of both spans in flight.
        down_outputs, up_outputs: frozen outputs that layers need, as bits.
        output_bytes: by bit, bytes of that output; both spans share it.
        limit_bytes: by device.
    """

    down_bytes: np.ndarray
    up_bytes: np.ndarray
    down_flight_bytes: np.ndarray
    up_flight_bytes: np.ndarray
    down_flights: np.ndarray
    up_flights: np.ndarray
    takes_turns: bool
    down_outputs: np.ndarray
    up_outputs: np.ndarray
    output_bytes: np.ndarray
    limit_bytes: np.ndarray

    @classmethod
    def unlimited(cls, num_down: int, num_up: int, num_stages: int) -> PairMemory:
        """Memory without end, for so many layers."""
        down, up = np.zeros((num_down + 1,) * 2), np.zeros((num_up + 1,) * 2)
        flights, limit_bytes = np.zeros(num_stages, np.int64), np.full(num_stages, np.inf)
        return cls(
            down, up, down, up, flights, flights, False, down.astype(np.int64), up.astype(np.int64),
            np.zeros(0), limit_bytes,
        )  # fmt: skip


def partition_bidirectional(
    down: ChainSeconds, up: ChainSeconds, *, num_stages: int, num_micro_batches: int
) -> PairedPartition:
    """Cuts two chains into stages that run in opposite directions over the same devices.

    Args:
        down, up: seconds of a micro-batch of each chain: forward and backward by layer, and messages
            behind each layer (the last layer's may be left out).
        num_stages: devices, each with a stage of both.
        num_micro_batches: of a step, of each chain.

    Returns:
        A partition whose longest device or used cut is least. O(stages x layers^4) at worst.

    Raises:
        ConfigError: the lists do not fit each other, a number is negative or not finite, or a chain
            has fewer layers than stages.
    """
    chains = []
    for name, (forward_s, backward_s, cut_s) in (("down.", down), ("up.", up)):
        cuts = list(cut_s)[:-1] if len(cut_s) == len(forward_s) else list(cut_s)
        check_chain(forward_s, backward_s, cuts, num_stages, num_micro_batches, name)
        chains.append((sum_spans(forward_s) + sum_spans(backward_s), np.array([0.0, *cuts, 0.0])))
    (down_s, down_cut_s), (up_s, up_cut_s) = chains
    # Boundaries b of `down` and c of `up` lie between the same two devices.
    link_s = np.maximum(down_cut_s[:, None], up_cut_s[None, :])
    spans, period_s = pair_spans(down_s, up_s, link_s, num_stages)
    return PairedPartition(
        down=list(spans[:num_stages]),
        up=list(spans[num_stages:]),
        objective_s=(num_micro_batches + 2 * num_stages - 2) * period_s,
        period_s=period_s,
    )


def pair_spans(
    down_s: np.ndarray,
    up_s: np.ndarray,
    link_s: np.ndarray,
    num_stages: int,
    memory: PairMemory | None = None,
) -> tuple[tuple[tuple[int, int], ...], float]:
    """Cuts two chains, as `fold_stages` cuts one.

    Returns:
        Spans of `down`, then those of `up`, and the seconds of the longest device or message; no spans
        and infinity if none fit into memory.
    """
    memory = memory or PairMemory.unlimited(len(down_s) - 1, len(up_s) - 1, num_stages)
    stops, starts = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    period_s = float(pair_stages(down_s, up_s, link_s, memory, num_stages, False, stops, starts))
    if period_s == np.inf:
        return (), period_s
    down, up = [0, *stops.tolist()], [*starts.tolist()[::-1], len(up_s) - 1]
    return (*itertools.pairwise(down), *itertools.pairwise(up)), period_s


def fold_stages(
    time_s: np.ndarray, link_s: np.ndarray, num_stages: int, memory: PairMemory | None = None
) -> tuple[tuple[tuple[int, int], ...], float]:
    """Cuts one chain into 2S - 1 spans: device d holds span d and span 2S - 2 - d.

    Args:
        time_s: seconds of both passes of layers i to j on a device [i, j].
        link_s: seconds of a micro-batch's messages between the devices that hold the layers before b
            and from c, and those between [b, c].
        num_stages: devices S; the chain has 2S - 1 layers or more.
        memory: of the devices; without end by default.

    Returns:
        Spans and the seconds of the longest device or message; no spans and infinity if none fit into
        memory.
    """
    memory = memory or PairMemory.unlimited(len(time_s) - 1, len(time_s) - 1, num_stages)
    stops, starts = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    period_s = float(pair_stages(time_s, time_s, link_s, memory, num_stages, True, stops, starts))
    if period_s == np.inf:
        return (), period_s
    # The middle span ends where the last device's partner would begin.
    bounds = sorted({0, *stops.tolist(), *starts.tolist(), len(time_s) - 1})
    return tuple(itertools.pairwise(bounds)), period_s
