"""Products of 4-bit weights with activations of 16 bits, byte by byte.

Where a group is half a chunk or a whole one, codes need no widening: a chunk is two vectors of 64
bytes, and processors multiply and add four pairs of bytes at once. A row of x becomes two digits of 8
bits with a step for each group. Codes meet them as they are; their zero points come in once a row, times
the groups' sums of x. So a token costs four products a chunk and few tokens are bound by reading weights.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows
from shared.kernels.weight_matmul.layout import CHUNK, PLANE, slots_per_group
from shared.kernels.weight_matmul.vectors import (
    add_scaled,
    add_scaled_halves,
    dot_bytes,
    float_zeros,
    int_zeros,
    less_product,
    load,
    load_bytes,
    load_halves,
    multiply,
    nibbles,
    prefetch,
    store,
    times_256,
    total,
)

if TYPE_CHECKING:
    from shared.kernels.weight_matmul.packed_weight import PackedWeight

__all__ = ["matmul", "serves"]

_inlined = njit(error_model="numpy", forceinline=True)

_F32, _I32 = np.float32, np.int32
_LARGEST = _F32(np.finfo(np.float32).max)
_LANES = 16
_ROWS = 2  # that share a piece of x
# That are fetched ahead, in whole pairs of rows: half as far takes a fifth longer on Zen 4.
_AHEAD_BYTES = 8192
_EXPONENT_BITS = 14  # of a fixed-point number, so that both of its digits fit 8 bits with a sign


def serves(packed: PackedWeight, num_digits: int) -> bool:
    """Whether the product with these weights can go by bytes."""
    width = slots_per_group(packed.group_size)
    return packed.bits == 4 and num_digits == 1 and width in (CHUNK // 2, CHUNK)


@compiled
def _fix(x, run_slots, high, low, step, weighted):
    """x = (high * 256 + low) * step, a power of 2 for each run of slots; weighted = step * run's sum.

    14 bits and a sign, so nothing of a bfloat16 is lost that is within 2**-6 of the run's largest. Digits
    lie chunk by chunk, the tokens' one after another; a chunk's planes as the codes' bytes lie.
    """
    bits = np.empty(1, np.int32)
    power = bits.view(np.float32)
    exponent_bits = _I32(_EXPONENT_BITS)
    for token in range(x.shape[0]):
        for run in range(x.shape[1] // run_slots):
            part = x[token, run * run_slots : (run + 1) * run_slots]
            top = _F32(0)
            is_finite = True
            for j in range(part.size):
                top = max(top, abs(part[j]))
                is_finite &= abs(part[j]) <= _LARGEST
            if is_finite:
                # 2**(exponent - 127) is the power of 2 above `top`, as far as both powers are floats.
                power[0] = top
                exponent = max((bits[0] >> _I32(23)) + _I32(1), _I32(31))
                bits[0] = (_I32(254) - exponent + exponent_bits) << _I32(23)
                inverse = power[0]
                bits[0] = (exponent - exponent_bits) << _I32(23)
                step[token, run] = power[0]
            else:
                inverse = _F32(0)
                step[token, run] = np.nan
            chunk, inside = run * run_slots // CHUNK, run * run_slots % CHUNK
            run_sum = _I32(0)
            for first in range(0, run_slots, PLANE):
                plane = (inside + first) // PLANE
                place = (0, 2, 1, 3)[plane] * PLANE
                upper_part = high[chunk, token, place : place + PLANE]
                lower_part = low[chunk, token, place : place + PLANE]
                for j in range(PLANE):
                    value = part[first + j] if is_finite else _F32(0)
                    fixed = _I32(np.floor(value * inverse + _F32(0.5)))
                    upper = (fixed + _I32(128)) >> _I32(8)
                    upper_part[j] = upper
                    lower_part[j] = fixed - (upper << _I32(8))
                    run_sum += fixed
            weighted[token, run] = step[token, run] * _F32(run_sum)


@_inlined
def _read_groups(scale, zero, row, groups, of, tokens, steps, weighted, edges, factors, sums):
    """Fills a row's factors, scale * step, and begins its sums: minus all zero points' share."""
    edge_scale, edge_zero = edges
    padded = steps.size // tokens
    for token in range(tokens):
        store(sums, (_ROWS * token + of) * _LANES, float_zeros())
    for group in range(0, padded, _LANES):
        at = row * groups + group
        if at + _LANES > scale.size:
            for j in range(_LANES):
                edge_scale[j] = scale[at + j] if at + j < scale.size else 0
                edge_zero[j] = zero[at + j] if at + j < scale.size else 0
            scales, zeros = load_halves(edge_scale, 0), load_bytes(edge_zero, 0)
        else:
            scales, zeros = load_halves(scale, at), load_bytes(zero, at)
        shifts = multiply(scales, zeros)
        for token in range(tokens):
            place = _ROWS * token + of
            store(
                factors,
                place * padded + group,
                multiply(scales, load(steps, token * padded + group)),
            )
            begun = load(sums, place * _LANES)
            store(
                sums,
                place * _LANES,
                less_product(begun, shifts, load(weighted, token * padded + group)),
            )


@_inlined
def _add_chunk(sums, first, second, high, low, at, runs_per_chunk, factors, run):
    """sums + the chunk's products with x[at:], each group's by its factor."""
    products = times_256(dot_bytes(int_zeros(), first, second, high, at))
    products = dot_bytes(products, first, second, low, at)
    if runs_per_chunk == 1:
        return add_scaled(sums, products, factors, run)
    return add_scaled_halves(sums, products, factors, run)


@compiled
def _multiply_rows(data, start, other, runs_per_chunk, chunks, high, low, padded, factors, sums):
    """Adds two rows' products, whose codes begin at `start` and `other`, to their sums."""
    tokens = sums.size // (_ROWS * _LANES)
    pair = max(1, _ROWS * (other - start))
    ahead = pair * ((_AHEAD_BYTES + pair - 1) // pair)
    if tokens == 1:  # the same with its sums in registers
        u, v = load(sums, 0), load(sums, _LANES)
        for chunk in range(chunks):
            place, at = chunk * CHUNK // 2, chunk * CHUNK
            prefetch(data, start + place + ahead)
            prefetch(data, other + place + ahead)
            run = chunk * runs_per_chunk
            first, second = nibbles(data, start + place)
            u = _add_chunk(u, first, second, high, low, at, runs_per_chunk, factors, run)
            first, second = nibbles(data, other + place)
            v = _add_chunk(v, first, second, high, low, at, runs_per_chunk, factors, padded + run)
        store(sums, 0, u)
        store(sums, _LANES, v)
        return
    for chunk in range(chunks):
        place, run = chunk * CHUNK // 2, chunk * runs_per_chunk
        prefetch(data, start + place + ahead)
        prefetch(data, other + place + ahead)
        a, b = nibbles(data, start + place)
        c, d = nibbles(data, other + place)
        for token in range(tokens):
            at = (chunk * tokens + token) * CHUNK
            p = _ROWS * token
            u, v = load(sums, p * _LANES), load(sums, (p + 1) * _LANES)
            u = _add_chunk(u, a, b, high, low, at, runs_per_chunk, factors, p * padded + run)
            v = _add_chunk(v, c, d, high, low, at, runs_per_chunk, factors, (p + 1) * padded + run)
            store(sums, p * _LANES, u)
            store(sums, (p + 1) * _LANES, v)


@compiled
def _matmul(
    data,  # uint8 [out * chunks * 64]
    scale,  # int16 [out * groups], float16 in truth
    zero,  # uint8 [out * groups]
    groups,
    chunks,
    runs_per_chunk,
    high,  # int8 [chunks * tokens * 128]
    low,
    step,  # float32 [tokens, runs], filled up to whole vectors with 0
    weighted,
    begin,
    stop,
    out,  # float32 [tokens, out]
):
    tokens, padded = step.shape
    steps, weights = step.reshape(-1), weighted.reshape(-1)
    factors = np.empty(_ROWS * tokens * padded, np.float32)
    sums = np.empty(_ROWS * tokens * _LANES, np.float32)
    edges = np.empty(_LANES, np.int16), np.empty(_LANES, np.uint8)
    row_bytes = chunks * CHUNK // 2
    for row in range(begin, stop, _ROWS):
        other = min(row + 1, stop - 1)
        for of in range(_ROWS):
            each = row if of == 0 else other
            _read_groups(
                scale, zero, each, groups, of, tokens, steps, weights, edges, factors, sums
            )
        _multiply_rows(
            data, row * row_bytes, other * row_bytes, runs_per_chunk, chunks, high, low, padded,
            factors, sums,
        )  # fmt: skip
        for token in range(tokens):
            out[token, row] = total(load(sums, _ROWS * token * _LANES))
            out[token, other] = total(load(sums, (_ROWS * token + 1) * _LANES))


def matmul(slots: Any, packed: PackedWeight, written: Any) -> None:
    """Writes slots of x, float32 [tokens, chunks * 128], times the transposed weight to `written`."""
    tokens, chunks = len(slots), packed.data.shape[1]
    runs_per_chunk = CHUNK // slots_per_group(packed.group_size)
    high, low = (np.empty((chunks, tokens, CHUNK), np.int8) for _ in range(2))
    padded = -(-chunks * runs_per_chunk // _LANES) * _LANES
    step, weighted = np.zeros((2, tokens, padded), np.float32)
    _fix(slots, CHUNK // runs_per_chunk, high, low, step, weighted)
    scale = packed.scale.view(torch.int16)
    inputs = (
        packed.data.view(-1).numpy(), scale.view(-1).numpy(), packed.zero.view(-1).numpy(),
        scale.shape[1], chunks, runs_per_chunk, high.reshape(-1), low.reshape(-1), step, weighted,
    )  # fmt: skip

    def run(begin: int, stop: int) -> None:
        _matmul(*inputs, begin, stop, written)

    over_rows(run, packed.out_features, packed.data.nbytes)
