"""Votes of the ranks that exchange weights: where one raises, all raise.

A rank that raises before an exchange sends nothing, and the others would wait for its messages until
they time out. So what can fail by itself (allocating, looking up boxes, computing a checksum) runs
under a vote, which takes one all-reduce of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared.comms.collectives import all_reduce
from shared.comms.group import Group
from shared.comms.reshard import Move
from shared.errors import CommError, DataError
from shared.topology.boxes import Box, intersect

__all__ = ["GIVEN_UP", "VOTE", "check_boxes", "find_values", "together"]

GIVEN_UP = "the exchange of weights was given up"
"""Prefix of the error of a rank that stopped because another rank raised."""


VOTE = "vote"
"""Phase under which a ledger counts votes, apart from weights."""


@contextmanager
def together(group: Group) -> Iterator[None]:
    """Waits at its end for all ranks of a group; if the body raised on one rank, all raise.

    Raises:
        CommError: if another rank raised; a rank's own exception is raised as it is.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised once the other ranks know
        failure = error
    number = 0 if failure is None else group.rank + 1
    with group.ledger.phase(VOTE):
        told = int(all_reduce(group, torch.tensor([number], device=group.device), "max"))
    if failure is not None:
        raise failure
    if told:
        raise CommError(
            f"{GIVEN_UP} when rank {group.ranks[told - 1]} raised; see that rank's error"
        )


def check_boxes(moves: Sequence[Move], rank: int) -> None:
    """Checks that a rank holds what it is to send, and has room for what it is to receive.

    Raises:
        DataError: if a box of its transfers lies in none of its own.
    """
    for move in moves:
        for src, dst, box in move.transfers:
            if rank == src:
                find_values(move.held, box)
            if rank == dst:
                find_values(move.wanted, box)


def find_values(tensors: Sequence[tuple[Box, Any]], box: Box) -> Tensor:
    """A view of a box's values.

    Raises:
        DataError: if none of the tensors' boxes contains it.
    """
    for outer, values in tensors:
        if intersect(outer, box) == box:
            return values[box.within(outer)]
    raise DataError(
        f"expected a tensor that holds {box}, got only {[outer for outer, _ in tensors]}; give the "
        f"boxes that the plan was made from"
    )
