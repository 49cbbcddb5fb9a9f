"""Questions to the ranks that own what is asked about, and their answers back in order.

Every rank asks and answers in every exchange, with nothing where it has nothing: sizes first, then the
questions, then the answers, each by `all_to_all_v`, which names the peer when one is lost.
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
    """Which items go to whom.

    Attributes:
        order: int64 [num_sent], positions of the items that have an owner, by owner.
        sends: how many go to each rank.
        num_items: all there are.
    """

    order: Int64[Tensor, " num_sent"]
    sends: list[int]
    num_items: int

    @classmethod
    def to(cls, owners: Int64[Tensor, " items"], num_ranks: int) -> SendPlan:
        """By the owner of each item; -1 goes nowhere."""
        order = torch.argsort(owners, stable=True)
        num_nowhere = int((owners < 0).sum())
        counts = torch.bincount(owners[order[num_nowhere:]], minlength=num_ranks)
        return cls(order[num_nowhere:], counts.tolist(), len(owners))

    def answers(
        self, num_came: Int64[Tensor, " num_sent"], which: Int64[Tensor, " askers"]
    ) -> tuple[Int64[Tensor, " answers"], Int64[Tensor, " answers"]]:
        """Gives answers, which came by owner, to everyone who asked.

        Args:
            num_came: answers to each item that was sent, in the order in which it was.
            which: the item that each asker asked about.

        Returns:
            The asker of each answer, ascending, and where among those that came it stands.
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
    """Sends `sends[p]` rows to each rank p, in order, and returns what came, by rank.

    Raises:
        CommError: a rank died, hangs, or the timeout passed; names it.
    """
    items = items.to(group.device).contiguous()
    came = items.new_empty((sum(recvs), *items.shape[1:]))
    all_to_all_v(group, items.split(list(sends)), came.split(list(recvs)), phase)
    return came


def tell_all(group: Group, numbers: Sequence[Sequence[int]], phase: str) -> list[list[int]]:
    """Sends the row of numbers `numbers[p]` to each rank p; returns the rows that came, by rank.

    Args:
        group: who tells.
        numbers: for each rank up to five of 64 bits, as many for all.
        phase: eight letters at most; ranks in different ones have lost step, and are told.

    Raises:
        CommError: a rank died, hangs, is in another phase, or the timeout passed; names it.
    """
    ones = [1] * group.world_size
    width, own = len(numbers[0]), int.from_bytes(phase.encode().ljust(8), "big")
    # Of one length in all phases: gloo would end the connection over another one, and say less.
    words = torch.zeros((group.world_size, 1 + _WORD), dtype=torch.int64)
    words[:, 0], words[:, 1 : 1 + width] = own, torch.tensor(numbers)
    came = swap(group, words, ones, ones, phase).tolist()
    for rank, (other, *_) in zip(group.ranks, came, strict=True):
        if other != own:
            name = other.to_bytes(8, "big", signed=True).decode(errors="replace").strip()
            raise CommError(
                f"rank {group.ranks[group.rank]} is in phase {phase!r}, rank {rank} in {name!r}; all "
                f"ranks sample, fetch and insert as often as one another, in the same order"
            )
    return [row[1 : 1 + width] for row in came]


def count_traffic(group: Group, phase: str) -> Traffic:
    """Bytes of a phase on this rank so far."""
    return group.ledger.snapshot().by_phase().get(phase, Traffic())


def check_owners(name: str, owners: Tensor, group: Group, lowest: int = 0) -> None:
    """Refuses owners that are no ranks of a group.

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
            f"{name}: expected parts in [{lowest}, {group.world_size}), one a rank of the group, got "
            f"{low} to {high}; where several ranks hold one part, give the group of `paired`"
        )
