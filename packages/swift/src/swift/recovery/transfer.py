"""Moving the state that is lost: every survivor that has an entry sends its share of it.

`plan_shares` is pure and the same on all ranks. Movable are moved by `shared.comms.reshard`, in
disjoint slices from all that hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from shared.comms import Group, reshard
from shared.errors import DataError
from shared.topology.boxes import Box
from swift.injection import reach

__all__ = ["Fetch", "Movable", "Share", "list_fetches", "move", "plan_shares"]

_LEAST_BYTES = 1 << 18
"""Below it a tensor is not divided among its holders."""
_LARGE_BYTES = 1 << 20
"""From it on a tensor's shares are messages of their own, from where they are held to where they are wanted.

Packing them copies every byte twice more, into memory that is mapped for it.
"""
_BATCH = 16
"""Entries whose small tensors are packed together. Their messages are under way while the next are prepared."""


@runtime_checkable
class Movable(Protocol):
    """The part of `swift.training.trainable.Trainable` that is moved."""

    def versions(self) -> list[int]:
        """Steps that each entry has had."""
        ...

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """Tensors of one entry."""
        ...

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """Tensors to fill in place."""
        ...

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """Tensors to fill, apart from the state."""
        ...

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """Takes tensors that a peer gave."""
        ...


class Fetch(NamedTuple):
    """One entry that one rank takes from others.

    Attributes:
        dst: the rank that takes it.
        entry: which.
        holders: ranks that have it at the target.
    """

    dst: int
    entry: int
    holders: tuple[int, ...]


class Share(NamedTuple):
    """Consecutive elements of a flattened tensor that one rank sends to another."""

    src: int
    dst: int
    start: int
    length: int


def list_fetches(
    fetch: Mapping[int, Mapping[int, int]], sets: Sequence[Sequence[int]]
) -> list[Fetch]:
    """What is fetched, with all ranks that can give it.

    Args:
        fetch: `Decision.fetch`: rank -> {entry: a rank that has it}.
        sets: ranks of each replica set.

    Returns:
        Fetches in the order in which all ranks move them. The rank that the decision names is the
        first holder.
    """
    found = []
    for dst in sorted(fetch):
        peers = next(ranks for ranks in sets if dst in ranks)
        for entry, named in sorted(fetch[dst].items()):
            others = [r for r in peers if r not in (dst, named) and entry not in fetch.get(r, ())]
            found.append(Fetch(dst, entry, (named, *others)))
    return found


def plan_shares(fetch: Fetch, numel: int, itemsize: int, number: int = 0) -> list[Share]:
    """Divides one tensor among its holders.

    Args:
        fetch: who takes it from whom.
        numel: elements of the tensor.
        itemsize: bytes of an element.
        number: of the tensor in its entry.

    Returns:
        Shares that cover the tensor: equal ones, or, of a small tensor, one; the holders take turns.
    """
    holders = fetch.holders
    if numel * itemsize < _LEAST_BYTES:
        # By the numbers alone: a rank does not know the sizes of what others send to each other.
        holders = (holders[(fetch.entry + number) % len(holders)],)
    shares = []
    for at, src in enumerate(holders):
        start, end = (numel * k // len(holders) for k in (at, at + 1))
        if end > start:
            shares.append(Share(src, fetch.dst, start, end - start))
    return shares


def move(
    group: Group,
    trainable: Movable,
    fetches: Sequence[Fetch],
    target: int,
    *,
    is_lost: bool,
    rest_bytes: Sequence[int],
    num_tensors: Mapping[int, Sequence[int]],
) -> int:
    """Moves entries between ranks; what this rank takes is in place, at the target, afterwards.

    A survivor takes entries into buffers of their own, so that it has its old ones if a rank dies
    meanwhile; a lost rank has nothing to keep.

    Args:
        group: all ranks.
        trainable: this rank's.
        fetches: of `list_fetches`, the same on all ranks.
        target: version of what is moved.
        is_lost: whether this rank holds nothing yet.
        rest_bytes: by rank, bytes of its last entry.
        num_tensors: by rank, tensors of each of its entries.

    Returns:
        Bytes that this rank received.

    Raises:
        CommError: a rank was lost.
        DataError: the optimizer makes state that a parameter's first step does not make.
    """
    reach("transfer")
    last = len(trainable.versions()) - 1
    begun: list[reshard.Resharding] = []
    taken: list[tuple[int, dict[str, Tensor]]] = []
    # By number alone: a rank does not know the sizes of what others send to each other.
    for first in range(0, len(fetches), _BATCH):
        large: list[reshard.Move] = []
        small: list[reshard.Move] = []
        for fetch in fetches[first : first + _BATCH]:
            is_mine = fetch.dst == group.rank
            if fetch.entry == last:
                # Packed, it may have another length on each rank: the named one alone sends it.
                fetch = fetch._replace(holders=fetch.holders[:1])
            if not is_mine and group.rank not in fetch.holders:
                continue
            if not is_mine:
                places = trainable.state_of(fetch.entry)
            elif fetch.entry == last:
                places = {"rest": torch.empty(rest_bytes[fetch.holders[0]], dtype=torch.uint8)}
            else:
                count = num_tensors[fetch.holders[0]][fetch.entry]
                wanted = trainable.prepare if is_lost else trainable.allocate
                places = {
                    name: one.contiguous()
                    for name, one in list(wanted(fetch.entry).items())[:count]
                }
                if len(places) < count:
                    raise DataError(
                        f"expected memory for {count} tensors of entry {fetch.entry}, got it for "
                        f"{', '.join(places)}: the optimizer has made others since a parameter's first "
                        f"step; make them in the first step"
                    )
            if is_mine:
                taken.append((fetch.entry, places))
            for number, tensor in enumerate(places.values()):
                flat = tensor.reshape(-1)
                (large if _num_bytes(flat) >= _LARGE_BYTES else small).append(
                    _plan_move(fetch, number, flat, is_mine=is_mine)
                )
        begun += [
            reshard.start(group, each, "refill") for each in (*([one] for one in large), small)
        ]
    for one in begun:
        one.wait()
    for entry, places in taken:
        trainable.fill(entry, places, target)
    return sum(_num_bytes(one) for _, places in taken for one in places.values())


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plan_move(fetch: Fetch, number: int, flat: Tensor, *, is_mine: bool) -> reshard.Move:
    shares = plan_shares(fetch, flat.numel(), flat.element_size(), number)
    whole = [(Box((0,), (flat.numel(),)), flat)]
    return reshard.Move(
        transfers=[reshard.Transfer(s.src, s.dst, Box((s.start,), (s.length,))) for s in shares],
        held=[] if is_mine else whole,
        wanted=whole if is_mine else [],
    )
