"""Which operations wait for which, directly or through others, as bitsets.

A set of operations is a Python integer whose bit i stands for operation i: the union of two sets of
3,000 operations takes about 0.2 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool

__all__ = ["find_ancestors", "find_descendants", "to_bits", "to_mask"]


def find_ancestors(needs: Sequence[Sequence[int]]) -> list[int]:
    """By operation, the set of all that must have ended before it starts.

    O(operations x dependencies / 64) words.

    Args:
        needs: by operation, numbers of those that it follows; all are smaller than its own.
    """
    ancestors: list[int] = []
    for needed in needs:
        bits = 0
        for i in needed:
            bits |= ancestors[i] | 1 << i
        ancestors.append(bits)
    return ancestors


def find_descendants(needs: Sequence[Sequence[int]]) -> list[int]:
    """By operation, the set of all that start after it has ended; arguments as `find_ancestors`."""
    descendants = [0] * len(needs)
    for i in range(len(needs) - 1, -1, -1):
        bits = descendants[i] | 1 << i
        for needed in needs[i]:
            descendants[needed] |= bits
    return descendants


def to_bits(numbers: Iterable[int]) -> int:
    """The set of these operations."""
    bits = 0
    for i in numbers:
        bits |= 1 << i
    return bits


def to_mask(bits: int, num_ops: int) -> Bool[np.ndarray, " ops"]:
    """A set of the first `num_ops` operations as an array, true for its members."""
    octets = np.frombuffer(bits.to_bytes((num_ops + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, bitorder="little", count=num_ops).astype(bool)
