"""Philox4x32-10 in numba: single words, and the noise of one row of columns.

State words live in 64-bit integers. numba widens a product of two uint32 to 64 bits anyway, and
kept wide it becomes one `vpmuludq` a product without shuffles.
"""

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["NOISE_BLOCK", "fill_noise", "philox_words"]

# Columns that one block of 16 calls serves, 8 noises a call.
NOISE_BLOCK = 128

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_16 = np.uint64(16)


@compiled
def philox_words(c0, c1, c2, c3, k0, k1):  # noqa: ANN001, ANN201
    """Four random words (uint64 below 2^32) of four counter words and two key words (alike)."""
    for _ in range(10):
        # Masked here rather than after the product: `vpmuludq` reads the low halves only, so the
        # mask costs nothing, and what stays in the high halves never meets a low one.
        p0 = _M0 * (c0 & _MASK)
        p1 = _M1 * (c2 & _MASK)
        c0 = (p1 >> _32) ^ c1 ^ k0
        c1 = p1
        c2 = (p0 >> _32) ^ c3 ^ k1
        c3 = p0
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0 & _MASK, c1 & _MASK, c2 & _MASK, c3 & _MASK


@compiled
def fill_noise(noise, row, k0, k1):  # noqa: ANN001, ANN201
    """Fill `noise` (uint16, a multiple of 128 long) for the row with counter `row` (uint64).

    Column j is served by call 16 * (j // 128) + j % 16 and takes its 16-bit lane (j % 128) // 16,
    so that 16 neighbouring columns come from the same lane of 16 neighbouring calls.
    """
    c0 = row & _MASK
    c1 = row >> _32
    zero = np.uint64(0)
    for block in range(noise.size // 128):
        base = block * 128
        for lane in range(16):
            call = np.uint64(block * 16 + lane)
            w0, w1, w2, w3 = philox_words(c0, c1, call, zero, k0, k1)
            noise[base + lane] = w0
            noise[base + 16 + lane] = w0 >> _16
            noise[base + 32 + lane] = w1
            noise[base + 48 + lane] = w1 >> _16
            noise[base + 64 + lane] = w2
            noise[base + 80 + lane] = w2 >> _16
            noise[base + 96 + lane] = w3
            noise[base + 112 + lane] = w3 >> _16
