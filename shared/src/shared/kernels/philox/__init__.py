"""Philox4x32-10: random words as a pure function of a counter and a key.

After Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). The
same four 32-bit counter words and two key words give the same four output words here (torch, the
definition), in `cpu.py` (numba) and in `gpu.py` (Triton), so that a sender and a test on another
device draw the same noise without exchanging any state.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

__all__ = ["ROUNDS", "key_words", "philox", "stream_key"]

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def stream_key(seed: int, *indices: int) -> int:
    """A 64-bit key for the stream named by `seed` and `indices`, in that order.

    Every index is folded in through a bijective 64-bit finaliser (multiply and xor-shift), so
    streams of neighbouring indices, or of the same indices in another order, share nothing.

    Args:
        seed: Any integer; taken modulo 2^64.
        indices: What tells one stream from another, for example epoch, layer, direction and
            destination rank; each taken modulo 2^64.

    Returns:
        A key in [0, 2^64).
    """
    state = _mix(seed & _MASK64)
    for index in indices:
        state = _mix((state + _mix((index + 0x9E3779B97F4A7C15) & _MASK64)) & _MASK64)
    return state


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def key_words(key: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit key."""
    return key & _MASK32, (key >> 32) & _MASK32


def philox(counter: Int64[Tensor, "*batch 4"], key: int) -> Int64[Tensor, "*batch 4"]:
    """Four random words for each counter.

    Args:
        counter: Counter words in [0, 2^32), the least significant first.
        key: The stream, in [0, 2^64).

    Returns:
        Random words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key_words(key)
    for _ in range(ROUNDS):
        hi0, lo0 = _multiply(c0, _MULTIPLIERS[0])
        hi1, lo1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return torch.stack([c0, c1, c2, c3], -1)


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # torch has no unsigned 64-bit product: two products with 16-bit halves stay below 2^48.
    low = word * (multiplier & 0xFFFF)
    high = word * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _MASK32
