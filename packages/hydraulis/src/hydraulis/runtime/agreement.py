"""Compares what ranks are about to do: those that disagree would wait for each other without end."""

from __future__ import annotations

import hashlib

import torch

from shared.comms import Group, all_gather
from shared.errors import CommError

__all__ = ["check_agreed"]


def check_agreed(group: Group | None, what: str, text: str, remedy: str) -> None:
    """Compares a text over ranks; every rank calls it.

    Args:
        group: all ranks; None for one.
        what: the text describes, for the error.
        text: equal on all ranks if they agree.
        remedy: what to do otherwise.

    Raises:
        CommError: ranks disagree; names those that differ from rank 0.
    """
    if group is None or group.world_size == 1:
        return
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    mine = torch.tensor([number], dtype=torch.int64, device=group.device)
    every = [int(one) for one in all_gather(group, mine)]
    other = [rank for rank, one in enumerate(every) if one != every[0]]
    if other:
        raise CommError(
            f"{what} on all ranks, but ranks {other} have another one than rank 0; {remedy}"
        )
