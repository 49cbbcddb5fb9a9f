"""The number formats that an operator may compute in, lowest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = ["HIGHEST", "PRECISIONS", "Precision", "check_precision", "sort_precisions"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A number format.

    Attributes:
        name: what plans, tables and the command line call it.
        bits: bits an element.
        mantissa_bits: stored bits of the significand; 0 for a fixed-point format.
        is_fixed: whether elements are integers times one scale.
        backward: precision of the products of the backward pass; weight gradients are returned in
            float32 all the same.
    """

    name: str
    bits: int
    mantissa_bits: int
    is_fixed: bool
    backward: str


HIGHEST = "fp32"
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp8", 8, 3, is_fixed=False, backward="bf16"),
        Precision("int8", 8, 0, is_fixed=True, backward="bf16"),
        Precision("bf16", 16, 7, is_fixed=False, backward="bf16"),
        Precision("fp16", 16, 10, is_fixed=False, backward="fp16"),
        Precision(HIGHEST, 32, 23, is_fixed=False, backward=HIGHEST),
    )
}
"""By name, lowest first. fp8 is e4m3, which rounds more coarsely than int8 with a scale a row."""


def check_precision(name: str) -> Precision:
    """Looks up a precision.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in PRECISIONS:
        raise ConfigError(
            f"precision: expected one of {', '.join(PRECISIONS)}, got {name!r}; choose one of them"
        )
    return PRECISIONS[name]


def sort_precisions(names: Sequence[str]) -> list[str]:
    """Sorts distinct names, lowest first.

    Raises:
        ConfigError: a name is unknown, or none is given.
    """
    if isinstance(names, str) or not names:
        raise ConfigError(
            f"precisions: expected names such as ('fp32', 'bf16'), got {names!r}; list one at least"
        )
    for name in names:
        check_precision(name)
    return [name for name in PRECISIONS if name in names]
