"""Bytes that a step keeps for its backward pass, by the precision of each operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from qsync.planner.cost_mapper import OUTPUTS
from qsync.precisions import HIGHEST, PRECISIONS
from shared.errors import DataError

__all__ = ["Role", "SavedBytes", "SavedTensor", "count_saved_bytes"]

Role = Literal["operand", "unused", "weight", "result", "constant"]
"""An operator's input as it computes with it; an input that only float32 keeps; its weight; its output; or
bytes that never change."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that an operator keeps for its backward pass.

    Attributes:
        op: the operator that keeps it.
        source: the operator whose output it is, or any other name of its storage. Tensors of one
            source that are kept in the precision in which they are stand for the same bytes.
        numel: number of elements; of a constant, bytes.
        role: "operand", "unused", "weight", "result" or "constant" (masks, indices, statistics).
        num_scales: scales kept beside it in 8 bits: 1 a tensor, or one a row.
    """

    op: str
    source: str
    numel: int
    role: Role
    num_scales: int = 1

    def __post_init__(self) -> None:
        if self.role not in get_args(Role) or self.numel < 0:
            raise DataError(
                f"saved tensor of {self.op!r}: expected a role of {', '.join(get_args(Role))} and "
                f"0 elements or more, got {self.role!r} and {self.numel}; record it again"
            )


def count_saved_bytes(tensors: Iterable[SavedTensor], precision: Callable[[str], str]) -> int:
    """Counts the bytes of saved tensors, shared storage once.

    A float32 weight is the parameter itself and adds nothing; a lowered one is a copy. A lowered
    operand is a copy of its operator's own, unless its source is in that precision already. An
    operator that runs twice makes copies twice.

    Args:
        tensors: as the profiler recorded them in float32.
        precision: returns an operator's precision by its name, float32 for a source that is none.
    """
    sizes: dict[tuple[str, str | int], int] = {}
    for i, tensor in enumerate(tensors):
        own = precision(tensor.op)
        stored = PRECISIONS[own].bits // 8 * tensor.numel
        if own in ("int8", "fp8"):
            stored += _SCALE_BYTES * tensor.num_scales
        if tensor.role == "constant":
            sizes["constant", tensor.source] = tensor.numel
        elif tensor.role == "weight":
            if own != HIGHEST:
                sizes["weight", i] = stored
        elif tensor.role == "result":
            sizes["as it is", tensor.source] = PRECISIONS[OUTPUTS[own]].bits // 8 * tensor.numel
        elif own == OUTPUTS[precision(tensor.source)]:
            sizes["as it is", tensor.source] = stored
        elif tensor.role != "unused" or own == HIGHEST:
            sizes["copy", i] = stored
    return sum(sizes.values())


class SavedBytes:
    """Bytes of saved tensors while precisions change; what a change does not concern is not counted anew.

    Args:
        tensors, precision: as of `count_saved_bytes`.
        other_bytes: what precision does not change.

    Attributes:
        total: all bytes, at the precisions of the latest `update`.
    """

    def __init__(
        self,
        tensors: Iterable[SavedTensor],
        precision: Callable[[str], str],
        other_bytes: float = 0,
    ) -> None:
        self._precision = precision
        # Tensors of one source may share its bytes; those of different sources never do.
        self._groups: dict[str, list[SavedTensor]] = defaultdict(list)
        self._sources: dict[str, set[str]] = defaultdict(set)
        for tensor in tensors:
            self._groups[tensor.source].append(tensor)
            self._sources[tensor.op].add(tensor.source)
            self._sources[tensor.source].add(tensor.source)
        self._bytes = {
            source: count_saved_bytes(group, precision) for source, group in self._groups.items()
        }
        self.total = other_bytes + sum(self._bytes.values())

    def list_sources(self, names: Iterable[str]) -> set[str]:
        """Lists the sources whose bytes depend on these operators' precisions."""
        return {source for name in names for source in self._sources.get(name, ())}

    def update(self, names: Iterable[str]) -> None:
        """Counts anew what depends on these operators, whose precisions have changed."""
        for source in self.list_sources(names):
            num_bytes = count_saved_bytes(self._groups[source], self._precision)
            self.total += num_bytes - self._bytes[source]
            self._bytes[source] = num_bytes
