"""Compares what ranks are about to do: those that disagree would wait for each other without end."""

from __future__ import annotations

import hashlib

import torch

from shared.comms import Group, all_gather
from shared.errors import CommError

__all__ = ["check_agreed"]


def check_agreed(
    group: Group | None, what: str, text: str, remedy: str, *, problem: Exception | None = None
) -> None:
    """Compares a text over ranks; every rank calls it.

    Args:
        group: all ranks; None for one.
        what: the text describes, for the error.
        text: equal on all ranks if they agree.
        remedy: what to do otherwise.
        problem: why this rank cannot go on, though others may.

    Raises:
        CommError: ranks disagree, naming those that differ from rank 0; or another rank cannot go on.
        Exception: `problem`, where there is one.
    """
    if group is None or group.world_size == 1:
        if problem is not None:
            raise problem
        return
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    mine = torch.tensor([number, problem is not None], dtype=torch.int64, device=group.device)
    told = [one.tolist() for one in all_gather(group, mine)]
    if problem is not None:
        raise problem
    failed = [rank for rank, (_, has_failed) in enumerate(told) if has_failed]
    if failed:
        raise CommError(f"{what} on all ranks, but ranks {failed} failed; see what they raised")
    every = [one for one, _ in told]
    other = [rank for rank, one in enumerate(every) if one != every[0]]
    if other:
        raise CommError(
            f"{what} on all ranks, but ranks {other} have another one than rank 0; {remedy}"
        )
