"""Philox4x32-10 in Triton: single words, and the noise of a tile of rows."""

import triton
import triton.language as tl

__all__ = ["noise_tile", "philox_words"]


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):  # noqa: ANN001, ANN201
    """Four random uint32 of four counter words (uint32, one shape) and two key words (uint32)."""
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        hi0 = tl.umulhi(c0, m0)
        lo0 = c0 * m0
        hi1 = tl.umulhi(c2, m1)
        lo1 = c2 * m1
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def noise_tile(counters, k0, k1, ROWS: tl.constexpr, PAD: tl.constexpr):  # noqa: ANN001, ANN201
    """16-bit noise [ROWS, PAD] (int32) of rows with these counters (int64); PAD = 128 * 2^n.

    Each call is computed once, in a tile of calls; then its four words are spread over eight
    columns by moving data between threads, which costs less than drawing them again.
    """
    calls: tl.constexpr = PAD // 8
    low = (counters & 0xFFFFFFFF).to(tl.uint32)
    high = ((counters >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros([ROWS, calls], tl.uint32)
    call = zeros + tl.arange(0, calls).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = philox_words(zeros + low[:, None], zeros + high[:, None], call, zeros, k0, k1)
    # The last two axes of a join count words in the order 0, 2, 1, 3 when read as one.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(words, [ROWS, PAD // 128, 16, 4])
    words = tl.reshape(tl.permute(words, [0, 1, 3, 2]), [ROWS, PAD // 128, 4, 1, 16])
    words = tl.broadcast_to(words, [ROWS, PAD // 128, 4, 2, 16])
    half = tl.reshape(tl.arange(0, 2).to(tl.uint32) * 16, [1, 1, 1, 2, 1])
    return tl.reshape((words >> half) & 0xFFFF, [ROWS, PAD]).to(tl.int32)
