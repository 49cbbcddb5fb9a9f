"""Which stages replay after a loss, who sends them what was logged, and who helps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Hole", "find_holes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Consecutive stages that replay together, between boundaries of which there are logs.

    Attributes:
        first: stage.
        last: stage; that after it and that before `first` send what they logged.
        helpers: other stages that compute a part of the micro-batches, where one stage replays.
    """

    first: int
    last: int
    helpers: tuple[int, ...] = ()

    @property
    def stages(self) -> range:
        """Those that replay."""
        return range(self.first, self.last + 1)

    @property
    def replayers(self) -> tuple[int, ...]:
        """Stages whose ranks compute."""
        return (*self.stages, *self.helpers)


def find_holes(
    num_stages: int,
    lost: Collection[int],
    logged: Sequence[bool] | None = None,
    num_helpers: int = 0,
) -> list[Hole]:
    """The stages that replay, in ascending order.

    A lost stage drags along those that no logged boundary divides from it. Neighbours that replay do so
    together: a lost one has lost its log too, and a living one is busy. Helpers are stages that neither replay nor send;
    the holes of one stage share them evenly.

    Args:
        num_stages: of the pipeline.
        lost: stages whose state and logs are gone.
        logged: for each boundary whether it is logged; None: all.
        num_helpers: for each hole at most.
    """
    logged = [True] * (num_stages - 1) if logged is None else logged
    replaying: set[int] = set()
    for stage in lost:
        first = last = stage
        while first > 0 and not logged[first - 1]:
            first -= 1
        while last < num_stages - 1 and not logged[last]:
            last += 1
        replaying.update(range(first, last + 1))
    ends: list[list[int]] = []
    for stage in sorted(replaying):
        if ends and ends[-1][1] == stage - 1:
            ends[-1][1] = stage
        else:
            ends.append([stage, stage])
    senders = {stage for first, last in ends for stage in (first - 1, last + 1)}
    idle = [stage for stage in range(num_stages) if stage not in replaying | senders]
    alone = [first for first, last in ends if first == last]
    shares = {first: tuple(idle[at :: len(alone)][:num_helpers]) for at, first in enumerate(alone)}
    return [
        Hole(first=first, last=last, helpers=shares.get(first, ()) if first == last else ())
        for first, last in ends
    ]
