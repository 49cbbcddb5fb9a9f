"""Attention of new tokens in machine code, for float32.

Positions are the fastest axis of keys and of values: scores add up a coordinate at a time, the mean a
dot product a coordinate, both in vectors over positions, and a head's scores stay in the first cache.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows

if TYPE_CHECKING:
    from shared.kernels.decode.slots import Places

__all__ = ["attend"]

_F32, _I32 = np.float32, np.int32
_LOG2_E = _F32(1.4426950408889634)
# ln 2 in two parts, the first with so few bits that its product with a whole number is exact.
_LN2_HIGH, _LN2_LOW = _F32(0.693359375), _F32(-2.12194440e-4)
_LOWEST = _F32(-87)


_contracted = partial(compiled, relaxed=frozenset({"contract"}))
_reassociated = partial(compiled, relaxed=frozenset({"contract", "reassoc"}))


@_contracted
def _turn(x, cos, sin, factor, out):
    half = cos.size
    for j in range(half):
        out[j] = (x[j] * cos[j] - x[half + j] * sin[j]) * factor
        out[half + j] = (x[half + j] * cos[j] + x[j] * sin[j]) * factor


@_contracted
def _scores(q, keys, row, count, out):
    """out = q keys[row:], the coordinates four a pass, since a pass is bound by reading out."""
    for j in range(count):
        out[j] = 0
    fours = q.size - q.size % 4
    for e in range(0, fours, 4):
        a, b, c, d = q[e], q[e + 1], q[e + 2], q[e + 3]
        x, y, z, w = row + e, row + e + 1, row + e + 2, row + e + 3
        for j in range(count):
            out[j] += a * keys[x, j] + b * keys[y, j] + c * keys[z, j] + d * keys[w, j]
    for e in range(fours, q.size):
        a, x = q[e], row + e
        for j in range(count):
            out[j] += a * keys[x, j]


@_reassociated
def _dot(weights, values, row, count):
    total = _F32(0)
    for j in range(count):
        total += weights[j] * values[row, j]
    return total


@_reassociated
def _sum(x):
    total = _F32(0)
    for j in range(x.size):
        total += x[j]
    return total


@compiled
def _top(x):
    top = x[0]
    for j in range(x.size):
        top = max(top, x[j])
    return top


@_contracted
def _exponentials(x, top, scale, bits):
    """x = exp(x - top) by Taylor's series on |t| <= ln 2 / 2, exact to 1e-7, and a power of two.

    `scale` is `bits` read as float32; 32-bit whole numbers shifted to a float's exponent make it.
    """
    for j in range(x.size):
        y = x[j] - top
        y = max(_LOWEST, y)
        n = np.floor(y * _LOG2_E + _F32(0.5))
        t = y - n * _LN2_HIGH - n * _LN2_LOW
        p = _F32(1 / 5040) * t + _F32(1 / 720)
        p = p * t + _F32(1 / 120)
        p = p * t + _F32(1 / 24)
        p = p * t + _F32(1 / 6)
        p = p * t + _F32(1 / 2)
        p = p * t + _F32(1)
        x[j] = p * t + _F32(1)
        bits[j] = (_I32(n) + _I32(127)) << _I32(23)
    for j in range(x.size):
        x[j] *= scale[j]


@compiled
def _attend(
    qkv,  # float32 [places, heads + 2 kv_heads, dim]
    cos,  # float32 [places, half]
    sin,
    prompt,  # float32 [2, prompts * kv_heads * dim, positions]
    own,  # float32 [2, slots * kv_heads * dim, positions]
    slots,  # int64 [places]
    prompts,
    prompt_lengths,
    made,
    kv_heads,
    begin,  # first place
    stop,
    out,  # float32 [places, heads, dim]
):
    heads, dim = out.shape[1:]
    together = heads // kv_heads
    scale = _F32(1 / np.sqrt(dim))
    both = np.empty(prompt.shape[2] + own.shape[2], np.float32)
    bits = np.empty(both.size, np.int32)
    powers = bits.view(np.float32)
    turned = np.empty(dim, np.float32)
    prompt_keys, prompt_values, own_keys, own_values = prompt[0], prompt[1], own[0], own[1]
    for place in range(begin, stop):
        at, first = made[place], prompt_lengths[place]
        seen, seen_own = both[: first + at + 1], both[first : first + at + 1]
        for k in range(kv_heads):
            row = (prompts[place] * kv_heads + k) * dim
            own_row = (slots[place] * kv_heads + k) * dim
            _turn(qkv[place, heads + k], cos[place], sin[place], _F32(1), turned)
            for e in range(dim):
                own_keys[own_row + e, at] = turned[e]
                own_values[own_row + e, at] = qkv[place, heads + kv_heads + k, e]
            for h in range(k * together, (k + 1) * together):
                _turn(qkv[place, h], cos[place], sin[place], scale, turned)
                _scores(turned, prompt_keys, row, first, seen)
                _scores(turned, own_keys, own_row, at + 1, seen_own)
                _exponentials(seen, _top(seen), powers, bits)
                factor = _F32(1) / _sum(seen)
                for e in range(dim):
                    mean = _dot(seen, prompt_values, row + e, first)
                    mean += _dot(seen_own, own_values, own_row + e, at + 1)
                    out[place, h, e] = mean * factor


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, prompt: Tensor, own: Tensor, places: Places
) -> Tensor:
    """As the reference, and with no key or value copied."""
    kv_heads = prompt.shape[2]
    out = torch.empty_like(qkv[:, : -2 * kv_heads], memory_format=torch.contiguous_format)
    inputs = (qkv, cos, sin, prompt.flatten(1, 3), own.view(2, -1, own.shape[4]), *places)
    arrays = [tensor.detach().contiguous().numpy() for tensor in inputs]
    written = out.numpy()
    num_bytes = len(qkv) * (prompt[:, 0].nbytes + own[:, 0].nbytes)
    over_rows(
        lambda begin, stop: _attend(*arrays, kv_heads, begin, stop, written), len(qkv), num_bytes
    )
    return out
