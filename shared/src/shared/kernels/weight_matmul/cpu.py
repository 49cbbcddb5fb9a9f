"""Unpacked weights, and products with them, in machine code.

The product is one of integers: a row of x becomes 16-bit digits with a step for each group, codes less
their zero point are small integers too, and processors multiply and add pairs of these twice as fast
as floats. Sums of a chunk are exact; then scales come in, in float32. Codes are taken out of a chunk
once for all tokens and two rows meet each piece of x, so that few tokens are bound by reading weights
and many by the multiplier: 32 products a cycle on a Zen 4 core, as many as its bfloat16 units do.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows
from shared.kernels.weight_matmul import nibbles_compiled
from shared.kernels.weight_matmul.layout import (
    CHUNK,
    PLANE,
    slots_from_codes,
    slots_per_group,
)
from shared.kernels.weight_matmul.vectors import (
    add_scaled,
    add_scaled_digits,
    dot,
    float_zeros,
    int_zeros,
    load,
    planes3,
    planes4,
    planes8,
    prefetch,
    store,
    store_scaled,
    subtract,
    total,
)

if TYPE_CHECKING:
    from shared.kernels.weight_matmul.packed_weight import PackedWeight

__all__ = ["matmul", "unpack"]

# A vector that is passed to a function that is called goes through memory.
_inlined = njit(error_model="numpy", forceinline=True)

_F32, _I32 = np.float32, np.int32
_LARGEST = _F32(np.finfo(np.float32).max)
_LANES = 16
# So many that their digits and sums stay in the second cache.
_TOKENS_AT_ONCE = 64


@_inlined
def _planes(data, at, bits, zeros, run, runs_per_chunk):
    """codes - zeros of the chunk at data[at:], as 4 planes; its first run of slots is `run`."""
    if bits == 4:
        p0, p1, p2, p3 = planes4(data, at)
    elif bits == 8:
        p0, p1, p2, p3 = planes8(data, at)
    else:
        p0, p1, p2, p3 = planes3(data, at)
    return (
        subtract(p0, zeros, run),
        subtract(p1, zeros, run + runs_per_chunk // 4),
        subtract(p2, zeros, run + runs_per_chunk // 2),
        subtract(p3, zeros, run + 3 * runs_per_chunk // 4),
    )


@_inlined
def _read_groups(scale, zero, row, runs_per_group, words, scales, zeros):
    """Scales, out of float16, and zero points of a row for each run of slots."""
    wide = words.view(np.float32)
    groups = scale.shape[1]
    for group in range(groups):
        word = _I32(scale[row, group])
        words[group] = (word & _I32(0x7FFF)) << _I32(13) | word & _I32(-(1 << 31))
    # The exponent's bias is 127 in place of 15; subnormal numbers come right too.
    for group in range(groups):
        wide[group] *= _F32(2.0**112)
    if runs_per_group == 1:
        for group in range(groups):
            scales[group] = wide[group]
            zeros[group] = zero[row, group]
    elif runs_per_group == 2:
        for group in range(groups):
            scales[2 * group] = scales[2 * group + 1] = wide[group]
        for group in range(groups):
            zeros[2 * group] = zeros[2 * group + 1] = zero[row, group]
    else:
        for group in range(groups):
            first = group * runs_per_group
            for run in range(first, min(first + runs_per_group, scales.size)):
                scales[run] = wide[group]
                zeros[run] = zero[row, group]


@_inlined
def _store_plane(out, start, first, last, plane, factor, edge):
    """out[start + first : start + last] = plane * factor, as far as the plane goes."""
    if last - first >= PLANE:
        store_scaled(out, start + first, plane, factor)
    elif last > first:
        store_scaled(edge, 0, plane, factor)
        for j in range(last - first):
            out[start + first + j] = edge[j]


@compiled
def _unpack(
    data,  # uint8 [out * chunks * 16 bits]
    scale,  # int16 [out, groups], float16 in truth
    zero,  # uint8 [out, groups]
    bits,
    runs_per_chunk,
    runs_per_group,
    num_runs,
    group_size,
    group_slots,
    begin,
    stop,
    out,  # float32 [out * in], or int16, bfloat16 in truth
    edge,  # 32 of the same
):
    words = np.empty(scale.shape[1], np.int32)
    scales, zeros = np.zeros(num_runs, np.float32), np.zeros(num_runs, np.int16)
    chunks, columns = num_runs // runs_per_chunk, out.size // scale.shape[0]
    for row in range(begin, stop):
        _read_groups(scale, zero, row, runs_per_group, words, scales, zeros)
        start = row * columns
        first = 0  # column of a group's next plane
        last = min(group_size, columns)
        left = group_slots  # slots of that group from there on
        for chunk in range(chunks):
            run = chunk * runs_per_chunk
            place = (row * chunks + chunk) * 16 * bits
            p0, p1, p2, p3 = _planes(data, place, bits, zeros, run, runs_per_chunk)
            if left >= CHUNK and last - first >= CHUNK:
                factor = scales[run]
                store_scaled(out, start + first, p0, factor)
                store_scaled(out, start + first + PLANE, p1, factor)
                store_scaled(out, start + first + 2 * PLANE, p2, factor)
                store_scaled(out, start + first + 3 * PLANE, p3, factor)
                first += CHUNK
                left -= CHUNK
            else:
                for p in range(4):
                    factor = scales[run + p * runs_per_chunk // 4]
                    plane = p0 if p == 0 else p1 if p == 1 else p2 if p == 2 else p3
                    _store_plane(out, start, first, last, plane, factor, edge)
                    first += PLANE
                    left -= PLANE
                    if left == 0:
                        first, left = last, group_slots
                        last = min(last + group_size, columns)
            if left == 0:
                first, left = last, group_slots
                last = min(last + group_size, columns)


@compiled
def _fix(x, run_slots, num_digits, begin, stop, high, low, step):
    """x = (high * 65536 + low) * step, or high * step; a step, a power of 2, for each run of slots.

    30 bits and a sign, so nothing of a float32 is lost that is within 2**-6 of the run's largest;
    with one digit 15 bits, nothing of a bfloat16 within 2**-7. Digits lie chunk by chunk, the tokens' one
    after another, as the product meets them.
    """
    bits = np.empty(1, np.int32)
    power = bits.view(np.float32)
    exponent_bits = _I32(30) if num_digits == 2 else _I32(15)
    for token in range(begin, stop):
        for run in range(step.shape[1]):
            part = x[token, run * run_slots : (run + 1) * run_slots]
            chunk, inside = run * run_slots // CHUNK, run * run_slots % CHUNK
            upper_part = high[chunk, token, inside : inside + run_slots]
            top = _F32(0)
            is_finite = True
            for j in range(part.size):
                top = max(top, abs(part[j]))
                is_finite &= abs(part[j]) <= _LARGEST
            if not is_finite:
                step[token, run] = np.nan
                upper_part[:] = 0
                if num_digits == 2:
                    low[chunk, token, inside : inside + run_slots] = 0
                continue
            # 2**(exponent - 127) is the power of 2 above `top`, as far as both powers are floats.
            power[0] = top
            exponent = max((bits[0] >> _I32(23)) + _I32(1), _I32(31))
            bits[0] = (_I32(254) - exponent + exponent_bits) << _I32(23)
            inverse = power[0]
            bits[0] = (exponent - exponent_bits) << _I32(23)
            step[token, run] = power[0]
            if num_digits == 2:
                lower_part = low[chunk, token, inside : inside + run_slots]
                for j in range(part.size):
                    fixed = _I32(part[j] * inverse)
                    upper = (fixed + _I32(1 << 15)) >> _I32(16)
                    upper_part[j] = upper
                    lower_part[j] = fixed - (upper << _I32(16))
            else:
                for j in range(part.size):
                    upper_part[j] = _I32(np.floor(part[j] * inverse + _F32(0.5)))


@_inlined
def _add_halves(sums, p0, p1, p2, p3, high, low, at, num_digits, factors, run):
    """sums + the chunk's products with x[at:], each half's by its factor."""
    h = dot(dot(int_zeros(), p0, high, at), p1, high, at + 32)
    i = dot(dot(int_zeros(), p2, high, at + 64), p3, high, at + 96)
    if num_digits == 1:
        return add_scaled(add_scaled(sums, h, factors, run), i, factors, run + 1)
    j = dot(dot(int_zeros(), p0, low, at), p1, low, at + 32)
    k = dot(dot(int_zeros(), p2, low, at + 64), p3, low, at + 96)
    return add_scaled_digits(add_scaled_digits(sums, h, j, factors, run), i, k, factors, run + 1)


@_inlined
def _add_quarter(sums, plane, high, low, at, num_digits, factors, run):
    """sums + a plane's products with x[at:] by its factor."""
    h = dot(int_zeros(), plane, high, at)
    if num_digits == 1:
        return add_scaled(sums, h, factors, run)
    return add_scaled_digits(sums, h, dot(int_zeros(), plane, low, at), factors, run)


@_inlined
def _add_quarters(sums, p0, p1, p2, p3, high, low, at, num_digits, factors, run):
    """As `_add_halves` with a factor for each plane."""
    sums = _add_quarter(sums, p0, high, low, at, num_digits, factors, run)
    sums = _add_quarter(sums, p1, high, low, at + 32, num_digits, factors, run + 1)
    sums = _add_quarter(sums, p2, high, low, at + 64, num_digits, factors, run + 2)
    return _add_quarter(sums, p3, high, low, at + 96, num_digits, factors, run + 3)


@compiled
def _multiply_rows(
    data,
    start,  # of the first row's codes
    other,  # of the second row's
    bits,
    runs_per_chunk,
    high,  # int16 [chunks * tokens * 128]
    low,
    num_digits,
    num_runs,
    zeros,  # int16 [2 * runs], of both rows
    factors,  # float32 [2 * tokens * runs], of both rows
    sums,  # float32 [2 * tokens * lanes]
):
    chunks = num_runs // runs_per_chunk
    tokens = sums.size // (2 * _LANES)
    for i in range(0, sums.size, _LANES):
        store(sums, i, float_zeros())
    if tokens == 1 and runs_per_chunk == 2:  # the same with its two sums in registers
        u, v = float_zeros(), float_zeros()
        for chunk in range(chunks):
            run, place, at = 2 * chunk, chunk * 16 * bits, chunk * CHUNK
            for line in range(0, 16 * bits, 64):
                prefetch(data, 2 * other - start + place + line)
                prefetch(data, 3 * other - 2 * start + place + line)
            p0, p1, p2, p3 = _planes(data, start + place, bits, zeros, run, 2)
            u = _add_halves(u, p0, p1, p2, p3, high, low, at, num_digits, factors, run)
            run += num_runs
            p0, p1, p2, p3 = _planes(data, other + place, bits, zeros, run, 2)
            v = _add_halves(v, p0, p1, p2, p3, high, low, at, num_digits, factors, run)
        store(sums, 0, u)
        store(sums, _LANES, v)
        return
    for chunk in range(chunks):
        run = chunk * runs_per_chunk
        place = chunk * 16 * bits
        # The next two rows: processors fetch ahead too little of two short streams.
        for line in range(0, 16 * bits, 64):
            prefetch(data, 2 * other - start + place + line)
            prefetch(data, 3 * other - 2 * start + place + line)
        p0, p1, p2, p3 = _planes(data, start + place, bits, zeros, run, runs_per_chunk)
        q0, q1, q2, q3 = _planes(data, other + place, bits, zeros, num_runs + run, runs_per_chunk)
        for token in range(tokens):
            at = (chunk * tokens + token) * CHUNK
            a, b = 2 * token * _LANES, (2 * token + 1) * _LANES
            f = 2 * token * num_runs + run
            u, v = load(sums, a), load(sums, b)
            if runs_per_chunk == 2:
                u = _add_halves(u, p0, p1, p2, p3, high, low, at, num_digits, factors, f)
                v = _add_halves(v, q0, q1, q2, q3, high, low, at, num_digits, factors, f + num_runs)
            else:
                u = _add_quarters(u, p0, p1, p2, p3, high, low, at, num_digits, factors, f)
                v = _add_quarters(
                    v, q0, q1, q2, q3, high, low, at, num_digits, factors, f + num_runs
                )
            store(sums, a, u)
            store(sums, b, v)


@compiled
def _matmul(
    data,  # uint8 [out * chunks * 16 bits]
    scale,  # int16 [out, groups], float16 in truth
    zero,  # uint8 [out, groups]
    bits,
    runs_per_chunk,
    runs_per_group,
    num_runs,
    high,  # int16 [chunks * tokens * 128]
    low,
    step,  # float32 [tokens, runs]
    num_digits,
    begin,
    stop,
    out,  # float32 [tokens, out]
):
    tokens = len(step)
    row_bytes = num_runs // runs_per_chunk * 16 * bits
    words = np.empty(scale.shape[1], np.int32)
    scales, zeros = np.zeros((2, num_runs), np.float32), np.zeros(2 * num_runs, np.int16)
    factors = np.empty(2 * tokens * num_runs, np.float32)
    sums = np.empty(2 * tokens * _LANES, np.float32)
    for row in range(begin, stop, 2):
        other = min(row + 1, stop - 1)
        _read_groups(scale, zero, row, runs_per_group, words, scales[0], zeros[:num_runs])
        _read_groups(scale, zero, other, runs_per_group, words, scales[1], zeros[num_runs:])
        for token in range(tokens):
            for of in range(2):
                part = factors[(2 * token + of) * num_runs :]
                for run in range(num_runs):
                    part[run] = scales[of, run] * step[token, run]
        _multiply_rows(
            data,
            row * row_bytes,
            other * row_bytes,
            bits,
            runs_per_chunk,
            high,
            low,
            num_digits,
            num_runs,
            zeros,
            factors,
            sums,
        )
        for token in range(tokens):
            out[token, row] = total(load(sums, 2 * token * _LANES))
            out[token, other] = total(load(sums, (2 * token + 1) * _LANES))


def _arrays(packed: PackedWeight) -> tuple[Any, ...]:
    """What both kernels begin with: codes, scales, zero points, and how runs of slots lie.

    A run is what one scale covers, as far as it lies in one half of a chunk.
    """
    width = slots_per_group(packed.group_size)
    runs_per_chunk = max(2, CHUNK // width)
    return (
        packed.data.view(-1).numpy(),
        packed.scale.view(torch.int16).numpy(),
        packed.zero.numpy(),
        packed.bits,
        runs_per_chunk,
        max(1, width * runs_per_chunk // CHUNK),
        packed.data.shape[1] * runs_per_chunk,
    )


def unpack(packed: PackedWeight, out: Tensor) -> None:
    """Writes (code - zero) * scale to `out` [out, in]."""
    buffer = torch.empty(out.shape) if out.dtype == torch.float16 else out
    values = buffer.view(torch.int16) if out.dtype == torch.bfloat16 else buffer
    written = values.view(-1).numpy()
    arrays = _arrays(packed)
    sizes = packed.group_size, slots_per_group(packed.group_size)

    def run(begin: int, stop: int) -> None:
        _unpack(*arrays, *sizes, begin, stop, written, np.empty(PLANE, written.dtype))

    over_rows(run, packed.out_features, out.nbytes)
    if buffer is not out:
        out.copy_(buffer)


def matmul(x: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Writes x [tokens, in] times the transposed weight to `out` [tokens, out]."""
    arrays = _arrays(packed)
    runs_per_chunk, num_runs = arrays[4], arrays[6]
    num_digits = 2 if x.dtype == torch.float32 else 1
    result = out if out.dtype == torch.float32 else torch.empty(out.shape)
    rows, written = x.to(torch.float32).numpy(), result.numpy()
    chunks, num_bytes = packed.data.shape[1], packed.data.nbytes
    for start in range(0, rows.shape[0], _TOKENS_AT_ONCE):
        stop = min(start + _TOKENS_AT_ONCE, rows.shape[0])
        slots = _slots(rows[start:stop], packed, chunks)
        if nibbles_compiled.serves(packed, num_digits):
            nibbles_compiled.matmul(slots, packed, written[start:stop])
            continue
        shape = chunks, stop - start, CHUNK
        high = np.empty(shape, np.int16)
        low = np.empty(shape if num_digits == 2 else (0, 0, 0), np.int16)
        step = np.empty((stop - start, num_runs), np.float32)
        _fix(slots, CHUNK // runs_per_chunk, num_digits, 0, stop - start, high, low, step)
        inputs = *arrays, high.reshape(-1), low.reshape(-1), step, num_digits
        part = written[start:stop]

        def run(begin: int, end: int, inputs: Any = inputs, part: Any = part) -> None:
            _matmul(*inputs, begin, end, part)

        over_rows(run, packed.out_features, num_bytes)
    if result is not out:
        out.copy_(result)


def _slots(rows: Any, packed: PackedWeight, chunks: int) -> Any:
    """Rows of x by slot [tokens, chunks * 128]: in numpy, as torch's pad takes as long as a small product."""
    if packed.in_features == chunks * CHUNK:
        return np.ascontiguousarray(rows)
    if slots_per_group(packed.group_size) != packed.group_size:
        return slots_from_codes(torch.from_numpy(rows), packed.group_size).contiguous().numpy()
    slots = np.zeros((rows.shape[0], chunks * CHUNK), np.float32)
    slots[:, : packed.in_features] = rows
    return slots
