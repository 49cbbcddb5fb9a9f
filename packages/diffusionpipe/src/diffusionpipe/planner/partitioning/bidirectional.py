"""Stages in pairs, one from the front and one from the back on each device.

Two backbones of a cascade run in opposite directions over the same devices (after DiffusionPipe,
section 4.3). One backbone is folded in the same way: a device holds a span and its mirror, so that
both ends of most skips meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffusionpipe.planner.partitioning.partition import check_chain, sum_spans
from diffusionpipe.planner.partitioning.partition_compiled import pair_stages

__all__ = ["PairedPartition", "fold_stages", "partition_bidirectional"]

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
    stops, starts = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    # Boundaries b of `down` and c of `up` lie between the same two devices.
    link_s = np.maximum(down_cut_s[:, None], up_cut_s[None, :])
    period_s = float(pair_stages(down_s, up_s, link_s, num_stages, False, stops, starts))
    ends = starts.tolist()
    return PairedPartition(
        down=list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True)),
        up=list(zip(ends[::-1], [*ends[-2::-1], len(up[0])], strict=True)),
        objective_s=(num_micro_batches + 2 * num_stages - 2) * period_s,
        period_s=period_s,
    )


def fold_stages(
    time_s: np.ndarray, link_s: np.ndarray, num_stages: int
) -> tuple[tuple[tuple[int, int], ...], float]:
    """Cuts one chain into 2S - 1 spans: device d holds span d and span 2S - 2 - d.

    Args:
        time_s: seconds of both passes of layers i to j on a device [i, j].
        link_s: seconds of a micro-batch's messages between the devices that hold the layers before b
            and from c, and those between [b, c].
        num_stages: devices S; the chain has 2S - 1 layers or more.

    Returns:
        Spans and the seconds of the longest device or message.
    """
    stops, starts = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    period_s = pair_stages(time_s, time_s, link_s, num_stages, True, stops, starts)
    # The middle span ends where the last device's partner would begin.
    bounds = sorted({0, *stops.tolist(), *starts.tolist(), len(time_s) - 1})
    return tuple(itertools.pairwise(bounds)), float(period_s)
