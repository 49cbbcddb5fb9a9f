"""Bytes that a step keeps for its backward pass, by the precision of each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from qsync.planner.cost_mapper import OUTPUTS
from qsync.precisions import HIGHEST, PRECISIONS
from shared.errors import DataError

__all__ = ["Role", "SavedTensor", "count_saved_bytes"]

Role = Literal["operand", "weight", "result", "constant"]
"""An operator's input as it computes with it; its weight; its output; or bytes that never change."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that an operator keeps for its backward pass.

    Attributes:
        op: the operator that keeps it.
        source: the operator whose output it is, or any other name of its storage. Tensors of one
            source that are kept in the precision in which they are stand for the same bytes.
        numel: number of elements; of a constant, bytes.
        role: "operand", "weight", "result" or "constant" (masks, indices, statistics).
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
    operand is a copy of its operator's own, unless its source is in that precision already.

    Args:
        tensors: as the profiler recorded them in float32.
        precision: returns an operator's precision by its name, float32 for a source that is none.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        own = precision(tensor.op)
        stored = PRECISIONS[own].bits // 8 * tensor.numel
        if own in ("int8", "fp8"):
            stored += _SCALE_BYTES * tensor.num_scales
        if tensor.role == "constant":
            sizes["constant", tensor.source] = tensor.numel
        elif tensor.role == "weight":
            if own != HIGHEST:
                sizes["weight", tensor.source, tensor.op] = stored
        elif tensor.role == "result":
            sizes["as it is", tensor.source] = PRECISIONS[OUTPUTS[own]].bits // 8 * tensor.numel
        elif own == OUTPUTS[precision(tensor.source)]:
            sizes["as it is", tensor.source] = stored
        else:
            sizes["copy", tensor.source, tensor.op] = stored
    return sum(sizes.values())
