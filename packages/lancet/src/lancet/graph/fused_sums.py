"""Runs groups of all-reduces as one: gradients are packed into a buffer, and averages are parts of it.

After tensor fusion as in DisCo (arXiv 2209.12769; its abstract alone was read). The buffer is a
matrix: each gradient has columns of it, a row is what one chunk of a ring adds up. So an element
belongs to the same chunk as in an all-reduce of its own, its sum has the same order of additions, and
its bits are the same on any number of ranks. Two ranks need no such care, as a + b is b + a: there
the buffer has one row, and averages are views of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from lancet.graph.operations import name_group
from lancet.graph.rewrite import collectives

__all__ = ["fuse_sums", "list_sum_dtypes", "pack", "unpack"]


def list_sum_dtypes(graph: fx.Graph, group_name: str) -> dict[str, str]:
    """By all-reduce that may run in a group, the dtype of what it adds up.

    These are sums over the group of real tensors of constant shape, of which only the average is read.

    Args:
        graph: after `average_outputs`.
        group_name: name of the process group.
    """
    dtypes = {}
    for start, kind in collectives(graph, group_name).items():
        value = _value(start.args[0])
        if kind == "all_reduce" and value is not None and _find_mean(start):
            dtypes[start.name] = str(value.dtype).removeprefix("torch.")
    return dtypes


def fuse_sums(graph: fx.Graph, groups: Iterable[Sequence[str]], size: int) -> None:
    """Puts one all-reduce in place of each group's.

    Each gradient is packed as soon as it is there, so that its own memory is free from then on.

    Args:
        graph: in launch order; the all-reduces of a group are neighbours among collectives.
        groups: names of each group's all-reduces, of those of `list_sum_dtypes`. The one that is left
            has the group's name as `meta["fused"]`.
        size: number of ranks.
    """
    nodes = {node.name: node for node in graph.nodes}
    position = {node: number for number, node in enumerate(graph.nodes)}
    for group in groups:
        starts = [nodes[name] for name in group]
        means = [_find_mean(start) for start in starts]
        assert None not in means, f"{name_group(group)}: more than its averages is read"
        _fuse_group(graph, starts, means, position, size)
        starts[-1].meta["fused"] = name_group(group)


def _fuse_group(
    graph: fx.Graph,
    starts: Sequence[fx.Node],
    means: Sequence[Any],
    position: Mapping[fx.Node, int],
    size: int,
) -> None:
    num_rows = _count_rows(size)
    gradients: list[Any] = [start.args[0] for start in starts]
    shapes = [tuple(gradient.meta["val"].shape) for gradient in gradients]
    offsets = [0]
    for shape in shapes:
        offsets.append(offsets[-1] + _count_columns(prod(shape), num_rows))
    buffer = None
    for k in sorted(range(len(starts)), key=lambda k: position[gradients[k]]):
        # A buffer that is filled must not be passed by, and inserting keeps an earlier pack first.
        after = gradients[k]
        if buffer is not None and gradients[k] is buffer.args[1]:
            after = buffer
        with graph.inserting_after(after):
            args = (buffer, gradients[k], offsets[k], (num_rows, offsets[-1]))
            buffer = graph.call_function(pack, args)
    waits = sorted((next(iter(start.users)) for start in starts), key=position.__getitem__)
    start = starts[-1]
    start.args = (buffer, *start.args[1:])
    waits[0].args = (start,)
    for mean, shape, offset in zip(means, shapes, offsets, strict=False):
        mean.args = (waits[0], offset, shape, num_rows, mean.args[1])
        mean.target = unpack
    for node in (*waits[1:], *starts[:-1]):
        graph.erase_node(node)


def _count_rows(size: int) -> int:
    """Rows of a buffer that so many ranks add up."""
    return 1 if size == 2 else size


def pack(buffer: Tensor | None, gradient: Tensor, offset: int, shape: tuple[int, int]) -> Tensor:
    """Copies a gradient into columns of a buffer from an offset on, and returns the buffer.

    Args:
        buffer: None makes one of the gradient's dtype, as a matrix of a shape.
    """
    if buffer is None:
        buffer = gradient.new_empty(shape)
    columns = buffer[:, offset : offset + _count_columns(gradient.numel(), shape[0])]
    flat, width = gradient.reshape(-1), columns.shape[1]
    num_whole = len(flat) // width if width else 0
    columns[:num_whole].copy_(flat[: num_whole * width].view(num_whole, width))
    if num_whole < len(columns):
        columns[num_whole:].zero_()
        rest = flat[num_whole * width :]
        columns[num_whole, : len(rest)].copy_(rest)
    return buffer


def unpack(
    buffer: Tensor, offset: int, shape: tuple[int, ...], num_rows: int, divisor: float
) -> Tensor:
    """The average of what was packed from an offset on.

    Returns:
        A view of a buffer of one row, whose elements are divided there; else a copy.
    """
    num_elements = prod(shape)
    columns = buffer[:, offset : offset + _count_columns(num_elements, num_rows)]
    if num_rows > 1:
        # A copy even of a single column, of which a view would do: it would keep the buffer.
        columns = columns.clone(memory_format=torch.contiguous_format)
    # Views of one buffer count the writes to all of it. This one counts its own, as autograd must
    # see whether this gradient was written to.
    mean = columns.view(-1)[:num_elements].data
    return mean.div_(divisor).view(shape)


def _count_columns(num_elements: int, num_rows: int) -> int:
    return -(-num_elements // num_rows)


def _find_mean(start: fx.Node) -> fx.Node | None:
    """The node that divides the sum, None if anything else reads it."""
    (wait,) = start.users
    readers = list(wait.users)
    if len(readers) != 1 or readers[0].target is not torch.ops.aten.div.Tensor:
        return None
    total, divisor = readers[0].args
    return readers[0] if total is wait and isinstance(divisor, int) else None


def _value(node: Any) -> Tensor | None:
    """The fake tensor of what an operator returns, None if its shape is data or it counts."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return None
    # An average of integers is of another dtype than their sum, and does not fit in its buffer.
    is_real = value.dtype.is_floating_point
    return value if is_real and all(isinstance(size, int) for size in value.shape) else None
