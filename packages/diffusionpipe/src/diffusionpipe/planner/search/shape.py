"""Stages on ranks, before anything is ordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diffusionpipe.planner.plan import Placement

__all__ = ["Shape", "place_ranks"]


class Shape(NamedTuple):
    """Stages on ranks, without the order of passes.

    Attributes:
        placement, num_micro_batches, batch_size, spans, devices, num_groups, backbones: as of `Plan`.
        estimate_s: rough seconds of a step, by which the search chooses what to replay.
    """

    placement: Placement
    num_micro_batches: int
    batch_size: int
    spans: tuple[tuple[int, int], ...]
    devices: tuple[tuple[int, ...], ...]
    num_groups: int
    backbones: tuple[int, ...]
    estimate_s: float = 0.0

    @property
    def num_stages(self) -> int:
        """Devices of one pipeline."""
        spans = len(self.spans)
        return {"data": 1, "chain": spans, "folded": (spans + 1) // 2, "opposite": spans // 2}[
            self.placement
        ]


def place_ranks(replicas: Sequence[int], *, is_inside: bool) -> tuple[tuple[int, ...], ...]:
    """Gives each stage of a chain its ranks.

    Args:
        replicas: number of ranks by stage.
        is_inside: a pipeline takes neighbouring ranks, so that its messages stay inside a host; else
            a stage's replicas do, so that its sums stay there. Needs equal replicas.
    """
    if is_inside:
        stages = len(replicas)
        return tuple(
            tuple(group * stages + stage for group in range(replicas[0])) for stage in range(stages)
        )
    ends = [sum(replicas[: stage + 1]) for stage in range(len(replicas))]
    return tuple(tuple(range(end - count, end)) for end, count in zip(ends, replicas, strict=True))
