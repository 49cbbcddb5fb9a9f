"""Digests of words in plain torch: the definition."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sums"]

# Those of splitmix64, as signed integers: torch has no unsigned product of 64 bits.
_WEYL, _FIRST, _SECOND = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def sums(words: Sequence[Tensor]) -> list[int]:
    """For each tensor (int64 [n]), the sum of mix(word + (place + 1) * Weyl), signed.

    mix(x) is x ^= x >> 30; x *= A; x ^= x >> 27; x *= B; x ^= x >> 31, in unsigned 64 bits.
    """
    return [
        int(_mix(x + _WEYL * torch.arange(1, len(x) + 1, device=x.device)).sum()) for x in words
    ]


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # Without the sign.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
