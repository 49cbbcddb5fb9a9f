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
from shared.errors import ConfigError, DataError

__all__ = ["Route", "check_owners", "swap", "tell_all", "traffic_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Which items go to whom.

    Attributes:
        order: int64 [num_sent], positions of the items that have an owner, by owner.
        sends: how many go to each rank.
    """

    order: Int64[Tensor, " num_sent"]
    sends: list[int]

    @classmethod
    def to(cls, owners: Int64[Tensor, " items"], num_ranks: int) -> Route:
        """By the owner of each item; -1 goes nowhere."""
        order = torch.argsort(owners, stable=True)
        num_nowhere = int((owners < 0).sum())
        counts = torch.bincount(owners[order[num_nowhere:]], minlength=num_ranks)
        return cls(order[num_nowhere:], counts.tolist())


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

    Raises:
        CommError: a rank died, hangs, or the timeout passed; names it.
    """
    ones = [1] * group.world_size
    return swap(group, torch.tensor(numbers, dtype=torch.int64), ones, ones, phase).tolist()


def traffic_of(group: Group, phase: str) -> Traffic:
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
