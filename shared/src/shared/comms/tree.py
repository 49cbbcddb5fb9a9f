"""Gather, scatter and broadcast of bytes of any size along a tree of ranks.

Ten thousand ranks that send to one would cost it as many connections. In a tree each rank exchanges
with a few, the messages of a host's ranks meet at its first rank before anything leaves the host,
and messages can be merged on the way. A rank that fails sends its error along the same tree: the
root, and from it all ranks, learn which rank failed instead of waiting for it.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shared.comms.group import Group
from shared.errors import CommError, ConfigError, DataError, TopologyError

__all__ = ["Tree", "broadcast", "gather", "scatter"]

_ARITY = 8
# Distinct from the tag of other point-to-point messages on the same group.
_TAG = 0x7EE
_IS_DATA, _IS_FAILURE = 0, 1
# Errors of these types arrive as the same type; any other arrives as a CommError.
_KINDS = {kind.__name__: kind for kind in (CommError, ConfigError, DataError, TopologyError)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree of all ranks, rooted at rank 0: a tree of hosts' first ranks, and one on each host.

    Attributes:
        world_size: number of ranks.
        arity: maximum number of children of a rank on its host, and of a host's first rank among
            other hosts' first ranks.
        ranks_per_host: number of consecutive ranks that share a host; the last host may have fewer.

    Raises:
        ConfigError: a number is below 1.
    """

    world_size: int
    arity: int = _ARITY
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.arity, self.ranks_per_host) < 1:
            raise ConfigError(f"expected a tree of positive numbers, got {self}")

    @staticmethod
    def of(group: Group) -> Tree:
        """The tree for a group, with hosts by torchrun's LOCAL_WORLD_SIZE.

        If hosts have different numbers of ranks, or the group is not the whole world, the tree has
        one rank per host. The first call is collective, so that all ranks of the group agree; later
        calls return the same tree without communication.

        Raises:
            CommError: a rank died or the timeout passed.
            ConfigError: the group is not gloo.
        """
        return _trees.get(group) or _agree(group)

    def parent(self, rank: int) -> int | None:
        """A rank's parent, which is a lower rank; None for rank 0."""
        host, local = divmod(rank, self.ranks_per_host)
        if local:
            return host * self.ranks_per_host + (local - 1) // self.arity
        return (host - 1) // self.arity * self.ranks_per_host if host else None

    def children(self, rank: int) -> list[int]:
        """A rank's children, in ascending order."""
        host, local = divmod(rank, self.ranks_per_host)
        base = host * self.ranks_per_host
        found = [base + child for child in self._below(local, self.ranks_per_host)]
        if not local:
            num_hosts = -(-self.world_size // self.ranks_per_host)
            found += [child * self.ranks_per_host for child in self._below(host, num_hosts)]
        return [child for child in found if child < self.world_size]

    def subtree(self, rank: int) -> list[int]:
        """A rank and all its descendants, in preorder."""
        found = [rank]
        for child in self.children(rank):
            found += self.subtree(child)
        return found

    def _below(self, position: int, count: int) -> range:
        first = position * self.arity + 1
        return range(min(first, count), min(first + self.arity, count))


# Agreed on once per group.
_trees: weakref.WeakKeyDictionary[Group, Tree] = weakref.WeakKeyDictionary()


def _agree(group: Group) -> Tree:
    """A tree of hosts if LOCAL_WORLD_SIZE is the same on every rank."""
    tree = Tree(world_size=group.world_size)
    if group.world_size == Group.world().world_size:
        mine = os.environ.get("LOCAL_WORLD_SIZE", "1").encode()
        outcome: bytes | Exception | None = None
        try:
            outcome = gather(group, mine, _same, tree)
        except CommError as error:
            outcome = error
        per_host = int(broadcast(group, outcome, tree))
        tree = Tree(world_size=group.world_size, ranks_per_host=per_host)
    _trees[group] = tree
    return tree


def _same(numbers: list[bytes]) -> bytes:
    return numbers[0] if len(set(numbers)) == 1 else b"1"


def gather(
    group: Group, data: bytes, merge: Callable[[list[bytes]], bytes], tree: Tree | None = None
) -> bytes | None:
    """Merges every rank's bytes on their way to rank 0.

    Args:
        group: a gloo group whose ranks take part.
        data: this rank's bytes.
        merge: makes one message of a rank's own bytes and its children's messages, in ascending
            order of the children; called once on each rank.
        tree: the tree, the same on all ranks; by default `Tree.of(group)`.

    Returns:
        On rank 0 the result of its `merge`; None elsewhere.

    Raises:
        Exception: on rank 0, if `merge` raised on any rank: an exception of the same type that
            names the rank if the type is one of `shared.errors`, else a CommError.
        CommError: on rank 0, if a rank died or the timeout passed; on another, if its parent did.
        ConfigError: the group is not gloo.
    """
    tree = tree or Tree.of(group)
    arrived = [data, *(_received(group, child, "gather") for child in tree.children(group.rank))]
    parts = [part for part in arrived if isinstance(part, bytes)]
    outcome = next((part for part in arrived if isinstance(part, Exception)), None)
    if outcome is None:
        try:
            outcome = merge(parts)
        except Exception as error:  # noqa: BLE001 - raised on rank 0
            outcome = error
    parent = tree.parent(group.rank)
    if parent is not None:
        _send(group, parent, outcome, "gather")
        return None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def scatter(
    group: Group, parts: Sequence[bytes] | Exception | None, tree: Tree | None = None
) -> bytes:
    """Sends each rank its own bytes from rank 0.

    Args:
        group: a gloo group whose ranks take part.
        parts: on rank 0 each rank's bytes, or an exception, which all ranks then raise; None
            elsewhere.
        tree: the tree, the same on all ranks; by default `Tree.of(group)`.

    Returns:
        This rank's bytes.

    Raises:
        Exception: rank 0 gave one.
        ConfigError: on all ranks, if rank 0 did not give one part per rank.
        CommError: a rank on the way from rank 0 died or the timeout passed.
    """
    tree = tree or Tree.of(group)
    parent = tree.parent(group.rank)
    if parent is None:
        order, outcome = range(group.world_size), parts
        if not isinstance(parts, Exception) and (parts is None or len(parts) != len(order)):
            found = "None" if parts is None else f"{len(parts)} parts"
            outcome = ConfigError(
                f"scatter needs bytes for {len(order)} ranks on rank 0, got {found}"
            )
    else:
        order, outcome = tree.subtree(group.rank), _received(group, parent, "scatter")
        if isinstance(outcome, bytes):
            outcome = _unbundled(outcome)
    if isinstance(outcome, Exception):
        for child in tree.children(group.rank):
            _send(group, child, outcome, "scatter")
        raise outcome
    held = dict(zip(order, outcome or (), strict=True))
    for child in tree.children(group.rank):
        below = _bundled([held[rank] for rank in tree.subtree(child)])
        _send(group, child, below, "scatter")
    return held[group.rank]


def broadcast(group: Group, data: bytes | Exception | None, tree: Tree | None = None) -> bytes:
    """Sends rank 0's bytes to all ranks.

    Args:
        group: a gloo group whose ranks take part.
        data: on rank 0 the bytes, or an exception, which all ranks then raise; None elsewhere.
        tree: the tree, the same on all ranks; by default `Tree.of(group)`.

    Raises:
        Exception: rank 0 gave one.
        ConfigError: on all ranks, if rank 0 gave None.
        CommError: a rank on the way from rank 0 died or the timeout passed.
    """
    tree = tree or Tree.of(group)
    parent = tree.parent(group.rank)
    if parent is not None:
        data = _received(group, parent, "broadcast")
    elif data is None:
        data = ConfigError("broadcast needs bytes on rank 0, got None")
    for child in tree.children(group.rank):
        _send(group, child, data, "broadcast")
    if isinstance(data, Exception):
        raise data
    return data


def _send(group: Group, peer: int, outcome: bytes | Exception, op: str) -> None:
    if isinstance(outcome, Exception):
        kind, data = _IS_FAILURE, _described(group, outcome).encode()
    else:
        kind, data = _IS_DATA, outcome
    tensors = [torch.tensor([kind, len(data)])]
    if data:
        tensors.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for tensor in tensors:
        with _blamed(group, "sending to", peer, op):
            dist.send(tensor, group=_gloo(group), group_dst=peer, tag=_TAG)
        _record(group, tensor, peer, op, "sent")


def _received(group: Group, peer: int, op: str) -> bytes | Exception:
    """A message, or an error: the one that the peer sent, or a failure of receiving from it."""

    def receive(tensor: Tensor) -> Tensor:
        if tensor.numel():
            with _blamed(group, "receiving from", peer, op):
                dist.recv(tensor, group=_gloo(group), group_src=peer, tag=_TAG)
            _record(group, tensor, peer, op, "received")
        return tensor

    try:
        kind, count = receive(torch.empty(2, dtype=torch.int64)).tolist()
        data = receive(torch.empty(count, dtype=torch.uint8)).numpy().tobytes()
    except CommError as error:
        return error
    if kind == _IS_DATA:
        return data
    name, _, text = data.decode().partition(" ")
    return _KINDS[name](text)


def _gloo(group: Group) -> dist.ProcessGroup:
    if group.backend != "gloo":
        raise ConfigError(f"expected a gloo group to send bytes, got {group}; use Group.control()")
    return group.checked()


@contextmanager
def _blamed(group: Group, verb: str, peer: int, op: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        me, other = group.ranks[group.rank], group.ranks[peer]
        raise CommError(
            f"rank {me}: {verb} rank {other} failed in a {op} along a tree: "
            f"{str(error).splitlines()[0]}. Rank {other} died or hangs; look at its own output, or "
            f"raise the group's timeout ({group.timeout.total_seconds():g} s) if it is slow"
        ) from error


def _record(
    group: Group, tensor: Tensor, peer: int, op: str, direction: Literal["sent", "received"]
) -> None:
    num_bytes = tensor.numel() * tensor.element_size()
    group.ledger.record(f"tree_{op}", group.ranks[peer], num_bytes, direction=direction)


def _described(group: Group, error: Exception) -> str:
    name, text = type(error).__name__, str(error)
    if name not in _KINDS:
        name, text = CommError.__name__, f"{name}: {text}"
    # Errors received from another rank, and those of rounds, already start with a rank.
    where = "" if text.startswith("rank ") else f"rank {group.ranks[group.rank]}: "
    return f"{name} {where}{text}"


def _bundled(parts: list[bytes]) -> bytes:
    return struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts)) + b"".join(parts)


def _unbundled(bundle: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", bundle)
    lengths = struct.unpack_from(f"<{count}q", bundle, 8)
    parts, start = [], 8 * (count + 1)
    for length in lengths:
        parts.append(bundle[start : start + length])
        start += length
    return parts
