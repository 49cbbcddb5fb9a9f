"""Attention of new tokens in Triton: a place and a key head a program, its query heads together.

The softmax is taken block by block (after FlashAttention, arXiv 2205.14135) and begins with the new
token, whose key and value are in registers: so nothing is read that another thread has just written.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from shared.kernels.decode.slots import Places

__all__ = ["attend"]

# A guess, no device was at hand.
_TILE = 4096
_MAX_POSITIONS = 128


@triton.jit
def _halves(head, offset, cos, sin, half, scale, inside):
    """Both halves of heads, turned and scaled."""
    first = tl.load(head + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head + half + offset, mask=inside, other=0.0).to(tl.float32)
    return (first * cos - second * sin) * scale, (second * cos + first * sin) * scale


@triton.jit
def _see(
    q1,  # float32 [HEADS, HALF]
    q2,
    keys,  # [2 half, positions]
    values,
    positions,
    count,  # of positions that are looked at
    half,
    top,  # float32 [HEADS]
    total,
    mean1,  # float32 [HEADS, HALF]
    mean2,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Goes on with a softmax over further keys and values."""
    row = tl.arange(0, HALF)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = at < count
        inside = (row < half)[:, None] & seen[None, :]
        place = row[:, None] * positions + at[None, :]
        k1 = tl.load(keys + place, mask=inside, other=0.0).to(tl.float32)
        k2 = tl.load(keys + half * positions + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(q1[:, :, None] * k1[None, :, :] + q2[:, :, None] * k2[None, :, :], 1)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrunk = tl.exp(top - higher)
        v1 = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        v2 = tl.load(values + half * positions + place, mask=inside, other=0.0).to(tl.float32)
        total = total * shrunk + tl.sum(weight, 1)
        mean1 = mean1 * shrunk[:, None] + tl.sum(weight[:, None, :] * v1[None, :, :], 2)
        mean2 = mean2 * shrunk[:, None] + tl.sum(weight[:, None, :] * v2[None, :, :], 2)
        top = higher
    return top, total, mean1, mean2


@triton.jit
def _attend(
    qkv,  # [places, heads + 2 kv_heads, 2 half]
    cos,  # [places, half]
    sin,
    prompt,  # [2, prompts, kv_heads, 2 half, prompt_positions]
    own,  # [2, slots, kv_heads, 2 half, own_positions]
    slots,  # int64 [places]
    prompts,
    prompt_lengths,
    made,
    out,  # [places, heads, 2 half]
    scale,
    kv_heads,
    half,
    prompt_positions,
    own_positions,
    prompt_size,  # elements of all keys
    own_size,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64)
    dim = 2 * half
    heads = kv_heads * TOGETHER
    head, row = tl.arange(0, HEADS), tl.arange(0, HALF)
    is_row = row < half
    inside = (head < TOGETHER)[:, None] & is_row[None, :]
    c = tl.load(cos + place * half + row, mask=is_row, other=0.0).to(tl.float32)
    s = tl.load(sin + place * half + row, mask=is_row, other=0.0).to(tl.float32)
    token = qkv + place * (heads + 2 * kv_heads) * dim
    query = head[:, None] * dim + row[None, :]
    q1, q2 = _halves(token + k * TOGETHER * dim, query, c[None, :], s[None, :], half, scale, inside)
    k1, k2 = _halves(token + (heads + k) * dim, row, c, s, half, 1.0, is_row)
    value = token + (heads + kv_heads + k) * dim
    v1 = tl.load(value + row, mask=is_row, other=0.0)
    v2 = tl.load(value + half + row, mask=is_row, other=0.0)
    at = tl.load(made + place)
    mine = own + (tl.load(slots + place) * kv_heads + k) * dim * own_positions
    kept = mine + row * own_positions + at
    k1, k2 = k1.to(own.dtype.element_ty), k2.to(own.dtype.element_ty)
    tl.store(kept, k1, mask=is_row)
    tl.store(kept + half * own_positions, k2, mask=is_row)
    tl.store(kept + own_size, v1, mask=is_row)
    tl.store(kept + own_size + half * own_positions, v2, mask=is_row)
    k1, k2, v1, v2 = k1.to(tl.float32), k2.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32)
    top = tl.sum(q1 * k1[None, :] + q2 * k2[None, :], 1)
    total = tl.full([HEADS], 1.0, tl.float32)
    mean1 = tl.zeros([HEADS, HALF], tl.float32) + v1[None, :]
    mean2 = tl.zeros([HEADS, HALF], tl.float32) + v2[None, :]
    first = prompt + (tl.load(prompts + place) * kv_heads + k) * dim * prompt_positions
    top, total, mean1, mean2 = _see(
        q1, q2, first, first + prompt_size, prompt_positions,
        tl.load(prompt_lengths + place).to(tl.int32), half, top, total, mean1, mean2, HALF, BLOCK,
    )  # fmt: skip
    top, total, mean1, mean2 = _see(
        q1, q2, mine, mine + own_size, own_positions, at.to(tl.int32), half, top, total, mean1,
        mean2, HALF, BLOCK,
    )  # fmt: skip
    found = out + (place * heads + k * TOGETHER) * dim + query
    tl.store(found, (mean1 / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(found + half, (mean2 / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, prompt: Tensor, own: Tensor, places: Places
) -> Tensor:
    """As the reference, sums in float32, and with no key or value copied."""
    _, _, kv_heads, dim, positions = prompt.shape
    out = torch.empty_like(qkv[:, : -2 * kv_heads], memory_format=torch.contiguous_format)
    together = out.shape[1] // kv_heads
    heads, half = triton.next_power_of_2(together), triton.next_power_of_2(dim // 2)
    if out.numel():
        _attend[(len(qkv), kv_heads)](
            qkv.detach().contiguous(), cos.contiguous(), sin.contiguous(), prompt, own,
            *places, out, dim**-0.5, kv_heads, dim // 2, positions, own.shape[4],
            prompt[0].numel(), own[0].numel(), TOGETHER=together, HEADS=heads, HALF=half,
            BLOCK=max(16, min(_MAX_POSITIONS, _TILE // (heads * half))),
        )  # fmt: skip
    return out
