"""Quantise and dequantise in numba, one pass over each row while it lies in the first cache."""

import numpy as np
import torch
from torch import Tensor

from shared.kernels._jit import compiled
from shared.kernels._rows import over_rows
from shared.kernels.philox import key_words
from shared.kernels.philox.cpu import fill_noise
from shared.kernels.quantize.reference import MIN_SCALE

__all__ = ["dequantize", "quantize"]

_NAN = np.int32(0x7FC00000)
_INF = np.int32(0x7F800000)
_KEEP = np.int32(0x7FFFFFFF)
_LOW = np.int32(0xFFFF)
_HIGH = np.int32(-0x10000)
_31 = np.int32(31)
_HALF = np.float32(0.5)
_FIXED = np.float32(65536.0)
_MIN_SCALE = np.float32(MIN_SCALE)
_NO_ROWS = np.empty(0, np.int64)


@compiled
def _row_params(bits_of_row, levels, is_bf16, ints, floats):  # noqa: ANN001, ANN202
    """Zero point and scale into floats[0:2]; False when the row has no finite parameters.

    `ints` and `floats` are two views of the same four words.
    """
    # Float minima do not vectorise without fastmath. As integers with the magnitude of negatives
    # flipped, floats sort in their order, and NaN and infinities come out as the extremes.
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for j in range(bits_of_row.size):
        word = bits_of_row[j]
        word = np.int32(word ^ ((word >> _31) & _KEEP))
        low = min(low, word)
        high = max(high, word)
    if high >= _INF or low <= np.int32(-0x7F800001):
        return False
    ints[0] = low ^ ((low >> _31) & _KEEP)
    ints[1] = high ^ ((high >> _31) & _KEEP)
    floats[0] = floats[0] + np.float32(0.0)
    if is_bf16:
        word = ints[0]
        if word < 0:
            word = np.int32(word + _LOW)
        ints[0] = word & _HIGH
    span = np.float32(floats[1] - floats[0])
    floats[1] = np.float32(0.0)
    if span > np.float32(0.0):
        scale = np.float32(span / levels)
        floats[1] = scale
        if np.float32(scale * levels) < span:
            ints[1] += 1
        if is_bf16:
            ints[1] = (ints[1] + _LOW) & _HIGH
        floats[1] = max(floats[1], _MIN_SCALE)
    return np.isfinite(floats[0]) and np.isfinite(span) and np.isfinite(floats[1])


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
    ints = np.empty(4, np.int32)
    floats = ints.view(np.float32)
    for i in range(start, stop):
        source = rows[i] if rows.size else i
        if not _row_params(x_bits[source], levels, is_bf16, ints, floats):
            params[i, 0] = _NAN >> 16 if is_bf16 else _NAN
            params[i, 1] = _NAN >> 16 if is_bf16 else _NAN
            data[i, :] = 0
            continue
        params[i, 0] = ints[0] >> 16 if is_bf16 else ints[0]
        params[i, 1] = ints[1] >> 16 if is_bf16 else ints[1]
        zero = floats[0]
        inverse = np.float32(0.0)
        if floats[1] > np.float32(0.0):
            inverse = np.float32(_FIXED / floats[1])
        if stochastic:
            fill_noise(noise, np.uint64(counters[i] if counters.size else i), k0, k1)
        for j in range(dim):
            padded[j] = x[source, j]
        for j in range(dim, padded.size):
            padded[j] = zero
        for c in range(width):
            byte = 0
            for k in range(per):
                j = k * width + c
                fixed = np.int32((padded[j] - zero) * inverse + _HALF)
                fixed = min(fixed, limit) + noise[j]
                byte |= (fixed >> 16) << (k * bits)
            data[i, c] = byte


@compiled
def _dequantize(data, params, is_bf16, bits, start, stop, out):  # noqa: ANN001, ANN202
    ints = np.empty(2, np.int32)
    floats = ints.view(np.float32)
    width = data.shape[1]
    dim = out.shape[1]
    mask = np.uint8((1 << bits) - 1)
    for i in range(start, stop):
        for side in range(2):
            ints[side] = np.int32(params[i, side]) << 16 if is_bf16 else params[i, side]
        zero = floats[0]
        scale = floats[1]
        for k in range(8 // bits):
            for c in range(min(width, dim - k * width)):
                code = np.float32((data[i, c] >> (k * bits)) & mask)
                out[i, k * width + c] = np.float32(code * scale) + zero


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


def dequantize(data: Tensor, params: Tensor, bits: int, out: Tensor) -> None:
    """Write zero + scale * code into `out` [n, dim], multiplied and added with two roundings."""
    is_bf16 = params.dtype == torch.bfloat16
    wire = params.view(torch.int16 if is_bf16 else torch.int32).numpy()
    source = data.numpy()
    buffer = out
    if out.dtype != torch.float32 or not out.is_contiguous():
        buffer = torch.empty(out.shape)
    target = buffer.numpy()

    def run(start: int, stop: int) -> None:
        _dequantize(source, wire, is_bf16, bits, start, stop, target)

    over_rows(run, len(data), out.numel() * 4)
    if buffer is not out:
        out.copy_(buffer)
