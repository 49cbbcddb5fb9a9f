"""When activations move: one list of moves, which drives threads and streams and is replayed in simulation.

After MEMO's rounding buffers (arXiv 2407.12117): a layer is sent while the next ones compute, and
fetched while those after it run backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo.planner.layer_plan import LayerPlan

__all__ = ["CopyStep", "Schedule", "schedule"]


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One thing to do with the stored items of a layer.

    Attributes:
        action: "send": begin to copy them to the store. "await_sent": wait until that is over, when the
            device's copy is gone. "fetch": begin to copy them back into a buffer.
        layer: number of the layer.
    """

    action: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Moves around each layer's passes, by the layer's number.

    Attributes:
        before_forward, after_forward: around a layer's forward.
        before_backward: before its saved tensors are restored, which waits for the layer's own fetch.
    """

    before_forward: tuple[tuple[CopyStep, ...], ...]
    after_forward: tuple[tuple[CopyStep, ...], ...]
    before_backward: tuple[tuple[CopyStep, ...], ...]


def schedule(
    layers: Sequence[LayerPlan], *, max_sending: int = 2, num_buffers: int = 2
) -> Schedule:
    """Moves of one forward and one backward.

    Args:
        layers: plans in the order of the forward.
        max_sending: layers that may be on their way to the store at once.
        num_buffers: layers that may be back on the device at once.
    """
    moving = [number for number, plan in enumerate(layers) if plan.has_stored]
    before: list[list[CopyStep]] = [[] for _ in layers]
    after: list[list[CopyStep]] = [[] for _ in layers]
    backward: list[list[CopyStep]] = [[] for _ in layers]
    for place, number in enumerate(moving):
        after[number].append(CopyStep("send", number))
        if place >= max_sending:
            before[number].append(CopyStep("await_sent", moving[place - max_sending]))
        wanted = place - num_buffers + 1  # into the buffer of the layer whose backward is just over
        if 0 <= wanted < len(moving) - num_buffers:
            backward[number].append(CopyStep("fetch", moving[wanted]))
    if moving:
        # Buffers are free at the end of the forward: the first to be needed come back meanwhile.
        after[-1] += [CopyStep("fetch", number) for number in moving[::-1][:num_buffers]]
    return Schedule(
        before_forward=tuple(map(tuple, before)),
        after_forward=tuple(map(tuple, after)),
        before_backward=tuple(map(tuple, backward)),
    )
