"""Requests to the ranks that own the requested items, and replies in the order of the requests.

All ranks take part in every exchange, if need be with empty messages: sizes first, then requests,
then replies, each by `all_to_all_v`, whose errors name the lost peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from shared.comms import Group, Traffic, all_to_all_v
from shared.errors import CommError, ConfigError, DataError

__all__ = ["SendPlan", "check_owners", "count_traffic", "swap", "tell_all"]

_WORD = 5


@dataclass(frozen=True, slots=True, eq=False)
class SendPlan:
    """Which items go to which rank.

    Attributes:
        order: int64 [num_sent], positions of the items that have an owner, sorted by owner.
        sends: number of items for each rank.
        num_items: number of items, with and without an owner.
    """

    order: Int64[Tensor, " num_sent"]
    sends: list[int]
    num_items: int

    @classmethod
    def to(cls, owners: Int64[Tensor, " items"], num_ranks: int) -> SendPlan:
        """Plans to send each item to its owner; -1 is not sent."""
        order = torch.argsort(owners, stable=True)
        num_nowhere = int((owners < 0).sum())
        counts = torch.bincount(owners[order[num_nowhere:]], minlength=num_ranks)
        return cls(order[num_nowhere:], counts.tolist(), len(owners))

    def answers(
        self, num_came: Int64[Tensor, " num_sent"], which: Int64[Tensor, " askers"]
    ) -> tuple[Int64[Tensor, " answers"], Int64[Tensor, " answers"]]:
        """Assigns replies, which arrive by owner, to the askers.

        Args:
            num_came: number of replies to each item sent, in the order sent.
            which: the item that each asker asked about.

        Returns:
            The asker of each reply, ascending, and the reply's position among those received.
        """
        found = torch.zeros((2, self.num_items), dtype=torch.int64)
        found[:, self.order] = torch.stack([num_came, num_came.cumsum(0) - num_came])
        count, begin = found[:, which]
        row = torch.repeat_interleave(count)
        return row, (begin - (count.cumsum(0) - count))[row] + torch.arange(len(row))


def swap(
    group: Group,
    items: Shaped[Tensor, "sent ..."],
    sends: Sequence[int],
    recvs: Sequence[int],
    phase: str,
) -> Shaped[Tensor, "received ..."]:
    """Sends `sends[p]` rows to each rank p, in order; returns the rows received, by rank.

    Args:
        group: the ranks that take part; all call it together.
        items: the rows, those for rank 0 first; moved to the group's device.
        sends: number of rows for each rank.
        recvs: number of rows from each rank.
        phase: name under which the ledger counts the bytes.

    Raises:
        CommError: a rank died, hangs, or the timeout passed; names it.
    """
    items = items.to(group.device).contiguous()
    came = items.new_empty((sum(recvs), *items.shape[1:]))
    all_to_all_v(group, items.split(list(sends)), came.split(list(recvs)), phase)
    return came


def tell_all(group: Group, numbers: Sequence[Sequence[int]], phase: str) -> list[list[int]]:
    """Sends the row of numbers `numbers[p]` to each rank p; returns the rows received, by rank.

    Args:
        group: the ranks that take part.
        numbers: for each rank up to five int64, the same number for all.
        phase: name of at most eight bytes; if ranks call with different ones, all of them raise.

    Raises:
        CommError: a rank died, hangs, is in another phase, or the timeout passed; names it.
    """
    ones = [1] * group.world_size
    width, own = len(numbers[0]), int.from_bytes(phase.encode().ljust(8), "big")
    # One length in all phases: gloo closes the connection on a mismatch, with a vaguer message.
    words = torch.zeros((group.world_size, 1 + _WORD), dtype=torch.int64)
    words[:, 0], words[:, 1 : 1 + width] = own, torch.tensor(numbers)
    came = swap(group, words, ones, ones, phase).tolist()
    for rank, (other, *_) in zip(group.ranks, came, strict=True):
        if other != own:
            name = other.to_bytes(8, "big", signed=True).decode(errors="replace").strip()
            raise CommError(
                f"rank {group.ranks[group.rank]} is in phase {phase!r}, rank {rank} in {name!r}; "
                f"all ranks must sample, fetch and insert equally often, in the same order"
            )
    return [row[1 : 1 + width] for row in came]


def count_traffic(group: Group, phase: str) -> Traffic:
    """Bytes of a phase on this rank so far."""
    return group.ledger.snapshot().by_phase().get(phase, Traffic())


def check_owners(name: str, owners: Tensor, group: Group, lowest: int = 0) -> None:
    """Raises unless all owners are ranks of a group, or at least `lowest`.

    Raises:
        ConfigError: this process is no member of the group.
        DataError: not int64 of one dimension, or outside [lowest, ranks of the group).
    """
    if group.rank < 0:
        raise ConfigError(f"expected a group that this rank is in, got {group}")
    if owners.dtype != torch.int64 or owners.ndim != 1:
        raise DataError(f"{name}: expected int64 [n], got {owners.dtype} {list(owners.shape)}")
    if not len(owners):
        return
    low, high = int(owners.min()), int(owners.max())
    if low < lowest or high >= group.world_size:
        raise DataError(
            f"{name}: expected parts in [{lowest}, {group.world_size}), one per rank of the group, "
            f"got {low} to {high}; where several ranks hold one part, give the group of `paired`"
        )
