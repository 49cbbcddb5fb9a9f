"""Quantise and dequantise in numba, a block of rows at a time while it lies in the first cache.

How close to the limit, on one core of a Zen 4 with 128 columns that lie in the third cache: a row
takes 58 ns with noise and 35 without, at any width. Noise alone is bound by its 20 wide products
and 60 further vector instructions for 8 columns (two a cycle at best, 17 ns a row; 23 to 30 reached
with the stores); finding extremes, coding and packing are some 25 instructions for 16 columns. That
is arithmetic, not memory: 8 bits move 5 bytes a column and reach about 10 GB/s, a third of what a
copy of large arrays does, and only fewer rounds of Philox would change it. Unpacking has next to no
arithmetic and runs at 70 to 95 % of the copy's bandwidth.
"""

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.philox import key_words
from shared.kernels.philox.cpu import fill_noise
from shared.kernels.quantize.reference import MIN_SCALE
from shared.kernels.rows import over_rows

__all__ = ["dequantize", "quantize"]

_NAN = np.int32(0x7FC00000)
_INF = np.int32(0x7F800000)
_KEEP = np.int32(0x7FFFFFFF)
_ORDERED_MINUS_INF = np.int32(-0x7F800001)
_LOW = np.int32(0xFFFF)
_HIGH = np.int32(-0x10000)
_31 = np.int32(31)
_16 = np.int32(16)
_HALF = np.float32(0.5)
_FIXED = np.float32(65536.0)
_MIN_SCALE = np.float32(MIN_SCALE)
# Rows whose extremes are found before any is packed: their divisions become one vector, and no row
# waits for the end of another's chain of parameters. 32 rows of 256 floats fit the first cache.
_BLOCK = 32
_NO_ROWS = np.empty(0, np.int64)


@compiled
def _extremes(bits_of_row):  # noqa: ANN001, ANN202
    # Float minima do not vectorise without fastmath. As integers with the magnitude of negatives
    # flipped, floats sort in their order, and NaN and infinities come out as the extremes.
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for j in range(bits_of_row.size):
        word = bits_of_row[j]
        word = np.int32(word ^ ((word >> _31) & _KEEP))
        low = min(low, word)
        high = max(high, word)
    return low, high


@compiled
def _params_of_block(ints, floats, levels, is_bf16, broken):  # noqa: ANN001, ANN202
    """Turn ordered extremes in ints[0:2] into zero point, scale and 65536 / scale, in place.

    `ints` and `floats` [3, rows] are two views of one memory.
    """
    for r in range(broken.size):
        low = ints[0, r]
        high = ints[1, r]
        broken[r] = (high >= _INF) | (low <= _ORDERED_MINUS_INF)
        ints[0, r] = low ^ ((low >> _31) & _KEEP)
        ints[1, r] = high ^ ((high >> _31) & _KEEP)
    for r in range(broken.size):
        floats[0, r] += np.float32(0.0)  # -0.0 becomes 0.0
    if is_bf16:
        for r in range(broken.size):
            word = ints[0, r]
            ints[0, r] = np.int32(word + (_LOW if word < 0 else np.int32(0))) & _HIGH
    for r in range(broken.size):
        span = np.float32(floats[1, r] - floats[0, r])
        floats[2, r] = span
        floats[1, r] = np.float32(span / levels)
    for r in range(broken.size):
        short = np.float32(floats[1, r] * levels) < floats[2, r]
        ints[1, r] += np.int32(1) if short else np.int32(0)
    if is_bf16:
        for r in range(broken.size):
            ints[1, r] = np.int32(ints[1, r] + _LOW) & _HIGH
    for r in range(broken.size):
        span = floats[2, r]
        scale = max(_MIN_SCALE, floats[1, r])
        flat = span <= np.float32(0.0)
        floats[1, r] = np.float32(0.0) if flat else scale
        floats[2, r] = np.float32(0.0) if flat else np.float32(_FIXED / scale)
        # A finite number minus itself is 0; infinities and NaN leave NaN.
        broken[r] |= (floats[0, r] - floats[0, r]) + (span - span) + (scale - scale) != 0.0


@compiled
def _code(row, noise, j, zero, inverse, limit):  # noqa: ANN001, ANN202
    fixed = np.int32((row[j] - zero) * inverse + _HALF)
    return np.int32(np.int32(min(fixed, limit) + noise[j]) >> _16)


@compiled
def _pack(row, noise, zero, inverse, limit, bits, out):  # noqa: ANN001, ANN202
    # One loop a width, so that the number of planes is a constant and the loop over bytes the one
    # that becomes vectors. Unsigned places, so that none is tested for being negative.
    width = np.uint64(out.size)
    w2 = width + width
    w4 = w2 + w2
    if bits == 8:
        for c in range(width):
            out[c] = _code(row, noise, c, zero, inverse, limit)
    elif bits == 4:
        for c in range(width):
            code = _code(row, noise, c, zero, inverse, limit)
            code |= _code(row, noise, c + width, zero, inverse, limit) << np.int32(4)
            out[c] = code
    elif bits == 2:
        for c in range(width):
            code = _code(row, noise, c, zero, inverse, limit)
            code |= _code(row, noise, c + width, zero, inverse, limit) << np.int32(2)
            code |= _code(row, noise, c + w2, zero, inverse, limit) << np.int32(4)
            code |= _code(row, noise, c + w2 + width, zero, inverse, limit) << np.int32(6)
            out[c] = code
    else:
        for c in range(width):
            code = _code(row, noise, c, zero, inverse, limit)
            code |= _code(row, noise, c + width, zero, inverse, limit) << np.int32(1)
            code |= _code(row, noise, c + w2, zero, inverse, limit) << np.int32(2)
            code |= _code(row, noise, c + w2 + width, zero, inverse, limit) << np.int32(3)
            code |= _code(row, noise, c + w4, zero, inverse, limit) << np.int32(4)
            code |= _code(row, noise, c + w4 + width, zero, inverse, limit) << np.int32(5)
            code |= _code(row, noise, c + w4 + w2, zero, inverse, limit) << np.int32(6)
            code |= _code(row, noise, c + w4 + w2 + width, zero, inverse, limit) << np.int32(7)
            out[c] = code


@compiled
def _quantize(  # noqa: ANN202
    x,  # noqa: ANN001  float32 [rows, dim]
    x_bits,  # noqa: ANN001  the same memory as int32
    rows,  # noqa: ANN001  int64 [n], or empty: row i
    counters,  # noqa: ANN001  int64 [n], or empty: counter i
    start,  # noqa: ANN001
    stop,  # noqa: ANN001
    bits,  # noqa: ANN001
    k0,  # noqa: ANN001
    k1,  # noqa: ANN001
    stochastic,  # noqa: ANN001
    is_bf16,  # noqa: ANN001
    data,  # noqa: ANN001  uint8 [n, width]
    params,  # noqa: ANN001  int32 or int16 [n, 2]
):
    dim = x.shape[1]
    width = data.shape[1]
    per = 8 // bits
    limit = np.int32(((1 << bits) - 1) << 16)
    levels = np.float32((1 << bits) - 1)
    noise = np.full((width * per + 127) // 128 * 128, 32768, np.uint16)
    padded = np.empty(width * per, np.float32)
    ints = np.empty((3, _BLOCK), np.int32)
    floats = ints.view(np.float32)
    broken = np.empty(_BLOCK, np.bool_)
    ints[:] = 0
    for first in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - first)
        for r in range(size):
            ints[0, r], ints[1, r] = _extremes(x_bits[rows[first + r] if rows.size else first + r])
        _params_of_block(ints, floats, levels, is_bf16, broken)
        for r in range(size):
            i = first + r
            if broken[r]:
                params[i, 0] = _NAN >> _16 if is_bf16 else _NAN
                params[i, 1] = _NAN >> _16 if is_bf16 else _NAN
                data[i, :] = 0
                continue
            params[i, 0] = ints[0, r] >> _16 if is_bf16 else ints[0, r]
            params[i, 1] = ints[1, r] >> _16 if is_bf16 else ints[1, r]
            if stochastic:
                fill_noise(noise, np.uint64(counters[i] if counters.size else i), k0, k1)
            source = rows[i] if rows.size else i
            if dim == padded.size:
                _pack(x[source], noise, floats[0, r], floats[2, r], limit, bits, data[i])
            else:
                padded[:dim] = x[source]
                padded[dim:] = floats[0, r]
                _pack(padded, noise, floats[0, r], floats[2, r], limit, bits, data[i])


@compiled
def _value(byte, shift, mask, zero, scale):  # noqa: ANN001, ANN202
    return np.float32(np.float32(np.int32(byte >> shift) & mask) * scale) + zero


@compiled
def _unpack(data, zero, scale, bits, row):  # noqa: ANN001, ANN202
    width = np.uint64(data.size)
    w2 = width + width
    w4 = w2 + w2
    if bits == 8:
        for c in range(width):
            row[c] = np.float32(np.float32(data[c]) * scale) + zero
    elif bits == 4:
        for c in range(width):
            byte = np.int32(data[c])
            row[c] = _value(byte, np.int32(0), np.int32(15), zero, scale)
            row[c + width] = _value(byte, np.int32(4), np.int32(15), zero, scale)
    elif bits == 2:
        for c in range(width):
            byte = np.int32(data[c])
            row[c] = _value(byte, np.int32(0), np.int32(3), zero, scale)
            row[c + width] = _value(byte, np.int32(2), np.int32(3), zero, scale)
            row[c + w2] = _value(byte, np.int32(4), np.int32(3), zero, scale)
            row[c + w2 + width] = _value(byte, np.int32(6), np.int32(3), zero, scale)
    else:
        for c in range(width):
            byte = np.int32(data[c])
            row[c] = _value(byte, np.int32(0), np.int32(1), zero, scale)
            row[c + width] = _value(byte, np.int32(1), np.int32(1), zero, scale)
            row[c + w2] = _value(byte, np.int32(2), np.int32(1), zero, scale)
            row[c + w2 + width] = _value(byte, np.int32(3), np.int32(1), zero, scale)
            row[c + w4] = _value(byte, np.int32(4), np.int32(1), zero, scale)
            row[c + w4 + width] = _value(byte, np.int32(5), np.int32(1), zero, scale)
            row[c + w4 + w2] = _value(byte, np.int32(6), np.int32(1), zero, scale)
            row[c + w4 + w2 + width] = _value(byte, np.int32(7), np.int32(1), zero, scale)


@compiled
def _dequantize(data, params, is_bf16, bits, start, stop, index, out):  # noqa: ANN001, ANN202
    ints = np.empty(2, np.int32)
    floats = ints.view(np.float32)
    dim = out.shape[1]
    padded = np.empty(data.shape[1] * (8 // bits), np.float32)
    for i in range(start, stop):
        for side in range(2):
            ints[side] = np.int32(params[i, side]) << _16 if is_bf16 else params[i, side]
        target = index[i] if index.size else i
        if dim == padded.size:
            _unpack(data[i], floats[0], floats[1], bits, out[target])
        else:
            _unpack(data[i], floats[0], floats[1], bits, padded)
            out[target] = padded[:dim]


def quantize(
    x: Tensor,
    bits: int,
    key: int,
    index: Tensor | None,
    stochastic: bool,
    data: Tensor,
    params: Tensor,
) -> None:
    """Quantise rows of `x` into `data` [n, width] and `params` [n, 2]."""
    counters = _NO_ROWS if index is None else index.contiguous().numpy()
    rows = counters
    if x.dtype != torch.float32 or not x.is_contiguous():
        # Only the rows asked for are converted.
        x = (x if index is None else x[index]).to(torch.float32).contiguous()
        rows = _NO_ROWS
    source = x.detach().numpy()
    is_bf16 = params.dtype == torch.bfloat16
    wire = params.view(torch.int16 if is_bf16 else torch.int32).numpy()
    target = data.numpy()
    k0, k1 = (np.uint64(word) for word in key_words(key))

    def run(start: int, stop: int) -> None:
        _quantize(
            source,
            source.view(np.int32),
            rows,
            counters,
            start,
            stop,
            bits,
            k0,
            k1,
            stochastic,
            is_bf16,
            target,
            wire,
        )

    over_rows(run, len(data), len(data) * x.shape[1] * 4)


def dequantize(
    data: Tensor, params: Tensor, bits: int, out: Tensor, index: Tensor | None = None
) -> None:
    """Write zero + scale * code into `out`, or into its rows `index`, with two roundings."""
    is_bf16 = params.dtype == torch.bfloat16
    wire = params.view(torch.int16 if is_bf16 else torch.int32).numpy()
    source = data.numpy()
    rows = _NO_ROWS if index is None else index.contiguous().numpy()
    buffer = out
    if out.dtype != torch.float32 or not out.is_contiguous():
        buffer = torch.empty(len(data), out.shape[1])
        rows = _NO_ROWS
    target = buffer.numpy()

    def run(start: int, stop: int) -> None:
        _dequantize(source, wire, is_bf16, bits, start, stop, rows, target)

    over_rows(run, len(data), buffer.numel() * 4)
    if buffer is not out:
        out[... if index is None else index] = buffer.to(out.dtype)
