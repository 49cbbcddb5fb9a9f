"""Decide how all ranks come to the same version after a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What every rank has to do; undoing comes before fetching.

    Attributes:
        target: The version, in steps, that all will have; None if a checkpoint decides.
        undo: Rank -> parameters whose last step it takes back.
        fetch: Rank -> {parameter: rank that has it at the target}. Lost ranks fetch everything.
        replay: Places in `sets` of those that rebuild their state from logs.
        from_checkpoint: Whether all ranks start again from the last checkpoint.
        reason: Why, in a sentence.
    """

    target: int | None
    undo: dict[int, list[int]]
    fetch: dict[int, dict[int, int]]
    replay: list[int]
    from_checkpoint: bool
    reason: str


def decide(
    sets: Sequence[Mapping[int, Sequence[int] | None]], logged: Sequence[bool] | None = None
) -> Decision:
    """Choose the newest version that all replica sets can reach, and how each rank reaches it.

    Let t+1 be the newest version that any surviving parameter has. A set reaches t+1 when one of
    its ranks holds all parameters at t+1 (the others fetch), or when nobody in it can help and its
    logs reach t+1. Otherwise it goes to t: every parameter at t+1 is undone. The target is what
    all sets reach; without survivors and without logs only a checkpoint is left.

    After "SWIFT: Expedited Failure Recovery for Large-scale DNN Training" (arXiv 2302.06173), with
    versions a parameter in place of one a rank. O(number of versions).

    Args:
        sets: One mapping a replica set: rank -> version of each parameter, in steps, or None for a
            lost rank. Ranks are unique over all sets.
        logged: By set, whether its logs reach t+1; None: nothing is logged.

    Raises:
        DataError: No set, a set without ranks, a rank in two sets, ranks of a set that differ in
            the number of parameters, or `logged` of another length than `sets`.
    """
    raise NotImplementedError
