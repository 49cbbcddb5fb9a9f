"""Digests of words in numba: two products of 64 bits a word, which the memory hides."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows

__all__ = ["sums"]

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_1 = np.uint64(1)
_30 = np.uint64(30)
_27 = np.uint64(27)
_31 = np.uint64(31)


@compiled
def _sum(words, start, stop):  # noqa: ANN001, ANN202
    total = np.uint64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        x = words[i] + (i + _1) * _WEYL
        x = (x ^ (x >> _30)) * _FIRST
        x = (x ^ (x >> _27)) * _SECOND
        total += x ^ (x >> _31)
    return total


def sums(words: Sequence[Tensor]) -> list[int]:
    """For each tensor (int64 [n]), the sum of its mixed words, modulo 2^64."""
    return [_sum_of(tensor.numpy().view(np.uint64)) for tensor in words]


def _sum_of(array: np.ndarray) -> int:
    parts: list[int] = []

    def run(start: int, stop: int) -> None:
        parts.append(int(_sum(array, start, stop)))

    over_rows(run, array.size, array.nbytes)
    return sum(parts)
