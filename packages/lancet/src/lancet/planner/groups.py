"""All-reduces that run in groups: the operations and the memory of a graph with groups as one each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lancet.graph.operations import LaunchOrder, Op, name_group
from lancet.planner.memory import KeptTensor

__all__ = ["contract_groups", "expand_groups", "fuse_tensors"]

# Bytes of an element at most: a buffer may have as many more elements for each gradient as ranks.
_MAX_ITEM_BYTES = 8


def contract_groups(ops: Iterable[Op], launches: LaunchOrder, latency_s: float) -> list[Op]:
    """The operations in launch order, each group as one, which takes the turn of its last all-reduce.

    Args:
        ops: all operations, in any order.
        launches: their order and groups.
        latency_s: seconds that a group saves for each all-reduce but one.
    """
    by_name = {op.name: op for op in ops}
    names = _name_members(launches.groups)
    fused = {
        group[-1]: Op(
            name_group(group),
            "all_reduce",
            max(sum(by_name[n].time_s for n in group) - latency_s * (len(group) - 1), 0.0),
            tuple(other for name in group for other in by_name[name].after),
        )
        for group in launches.groups
    }
    result = []
    for name in launches.names:
        if name in names and name not in fused:
            continue
        op = fused.get(name, by_name[name])
        result.append(replace(op, after=tuple(names.get(other, other) for other in op.after)))
    return result


def expand_groups(names: Iterable[str], groups: Iterable[tuple[str, ...]]) -> LaunchOrder:
    """An order of `contract_groups`' operations as one of all, the members of a group in a row."""
    members = {name_group(group): group for group in groups}
    order = [own for name in names for own in members.get(name, (name,))]
    return LaunchOrder(tuple(order), tuple(members[name] for name in names if name in members))


def fuse_tensors(
    tensors: Iterable[KeptTensor], ops: Iterable[Op], launches: LaunchOrder, num_ranks: int
) -> list[KeptTensor]:
    """The tensors of a graph whose all-reduces run in groups.

    A group's buffer lives from its first gradient on. Each gradient is packed as soon as it is
    there. On two ranks averages are views of the buffer, on more they are copies.

    Args:
        tensors: of the graph without groups.
        ops: all operations, in any order.
        launches: their order and groups.
        num_ranks: ranks that add up.
    """
    rank = {name: number for number, name in enumerate(launches.names)}
    sources, readers = {}, {}
    names = _name_members(launches.groups)
    for op in ops:
        if op.name in names:
            sources[op.name] = max(op.after, key=rank.__getitem__, default=None)
        for other in op.after:
            if other in names:
                readers[op.name] = other
    # By tensor of a single all-reduce, the group's buffer.
    buffers = {name_group(group): _Buffer() for group in launches.groups}
    for group in launches.groups:
        makers = {sources[name] for name in group}
        first = None if None in makers else min(makers, key=lambda name: rank[name or ""])
        buffers[name_group(group)].maker = names.get(first or "", first)
    result = []
    for tensor in tensors:
        maker = tensor.maker or ""
        own = names.get(maker)
        if own is None and num_ranks == 2 and maker in readers:
            buffers[names[readers[maker]]].add_views(tensor)
        elif own is not None:
            padding = 0 if num_ranks == 2 else num_ranks * _MAX_ITEM_BYTES
            buffers[own].num_bytes += tensor.num_bytes + padding
            buffers[own].add_views(tensor)
        else:
            others = tuple(name for name in tensor.readers if name not in names)
            result.append(replace(tensor, readers=others))
    for name, buffer in buffers.items():
        users = tuple(dict.fromkeys(names.get(user, user) for user in buffer.readers))
        result.append(
            KeptTensor(
                num_bytes=buffer.num_bytes,
                maker=buffer.maker,
                readers=(name, *users),
                is_kept=buffer.is_kept,
            )
        )
    return result


def _name_members(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    """By all-reduce, its group's name."""
    return {name: name_group(group) for group in groups for name in group}


@dataclass(slots=True)
class _Buffer:
    maker: str | None = None
    num_bytes: int = 0
    readers: tuple[str, ...] = ()
    is_kept: bool = False

    def add_views(self, tensor: KeptTensor) -> None:
        """Counts a tensor's readers as the buffer's."""
        self.readers += tensor.readers
        self.is_kept = self.is_kept or tensor.is_kept
