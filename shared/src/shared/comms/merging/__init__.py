"""Reduce rows over ranks by any associative merge, with the same bits on every rank.

torch's all-reduce knows sums, maxima and products of single numbers. Here a rank's state is one
tensor or several with one row each, such as the maximum, total and weighted sum of a softmax, and
the caller says how the states of two ranks merge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from shared.comms.collectives import all_to_all_v
from shared.comms.group import Group
from shared.comms.merging.wire import RowFormat
from shared.errors import ConfigError

__all__ = ["merge_all_reduce"]

State = TypeVar("State", bound="Tensor | tuple[Tensor, ...]")


@torch.no_grad()
def merge_all_reduce(
    group: Group,
    state: State,
    merge: Callable[[Any, Any], Any],
    wire: Literal["float32", "bfloat16", "int8"] | None = None,
    phase: str | None = None,
) -> State:
    """Merges the states of all ranks row by row, in the order of ranks.

    Two ranks send each other their whole states. More ranks each merge one part of the rows, which
    all others send them, and then send the merged part to all: 2 (n - 1) / n of a state a rank.

    What travels is encoded once by its owner, who goes on with the decoded values too, so that all
    ranks have the same bits. Integers and bits always travel as they are. Not differentiable.

    Args:
        group: group whose ranks take part.
        state: one tensor, or a tuple (also a named one) of tensors with the same number of rows;
            shapes and types are the same on every rank.
        merge: takes the states of two groups of neighbouring ranks, the lower first, for some of
            the rows, and returns one such state. Associative; each row on its own.
        wire: type of floats on the way; None: their own. "bfloat16" and "int8" narrow only the
            widest tensors, of 16 or more numbers a row, and send others, such as the maxima of a
            softmax, in float32. "int8" sends a row as 8-bit codes between its extremes; a row whose numbers are
            all equal, infinite too, is exact, one with some infinities becomes NaN.
        phase: name of the program's phase in the ledger; its open phase when None.

    Returns:
        The merged state, of the same kind; on one rank the given one.

    Raises:
        ConfigError: if `wire` is unknown, the tensors' rows differ, or `merge` returns other shapes
            or types.
        CommError: if a peer died, the timeout passed or a peer's shapes differ.
    """
    group.checked()
    tensors = _list_tensors(state)
    num_rows = {tensor.shape[:1] for tensor in tensors}
    if len(num_rows) != 1 or torch.Size() in num_rows:
        raise ConfigError(
            f"expected a state of tensors with the same number of rows, got "
            f"{[list(tensor.shape) for tensor in tensors]}"
        )
    form = RowFormat(tensors, wire)
    size, count = group.world_size, len(tensors[0])
    if size == 1:
        return state
    message = form.encode(tensors)

    def merge_messages(messages: list[Tensor]) -> list[Tensor]:
        parts = [form.decode(message) for message in messages]
        if not len(parts[0][0]):
            return parts[0]
        merged = _list_tensors(reduce(merge, [_rebuild(state, part) for part in parts]))
        _check_merged(merged, parts[0])
        return merged

    if size == 2:
        messages = [torch.empty_like(message) for _ in range(size)]
        all_to_all_v(group, [message] * size, messages, phase)
        return _rebuild(state, merge_messages(messages))
    counts = [count * (rank + 1) // size - count * rank // size for rank in range(size)]
    own = list(message.split(counts))
    parts = [torch.empty_like(own[group.rank]) for _ in range(size)]
    all_to_all_v(group, own, parts, phase)
    part = form.encode(merge_messages(parts))
    whole = torch.empty_like(message)
    all_to_all_v(group, [part] * size, whole.split(counts), phase)
    return _rebuild(state, form.decode(whole))


def _list_tensors(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def _rebuild(like: Any, tensors: list[Tensor]) -> Any:
    """The tensors as a state of the same kind: one tensor, a tuple or a named one."""
    if isinstance(like, Tensor):
        return tensors[0]
    return tuple(tensors) if type(like) is tuple else type(like)(*tensors)


def _check_merged(merged: list[Tensor], parts: list[Tensor]) -> None:
    kinds = [[(tensor.dtype, list(tensor.shape)) for tensor in side] for side in (parts, merged)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"expected merge to return what it takes, {kinds[0]}, got {kinds[1]}; keep types and "
            f"shapes"
        )
