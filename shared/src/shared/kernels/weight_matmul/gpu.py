"""Unpacked weights, and products with them, in Triton.

A program holds the sums of some tokens and rows; of each chunk it takes out four planes of codes, less
their zero points, and multiplies them with 32 columns of x each. The small integers are exact in every
float type, so scales multiply sums, not weights. Not tuned on a device.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.weight_matmul.layout import slots_from_codes, slots_per_group

if TYPE_CHECKING:
    from shared.kernels.weight_matmul.packed_weight import PackedWeight

__all__ = ["matmul", "unpack"]

_ROWS = 64
_NUM_WARPS = 4
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _plane(chunk, inside, P: tl.constexpr, BITS: tl.constexpr):
    """Codes [rows, 32] of plane P of the chunks at `chunk` [rows, 1]."""
    lanes = tl.arange(0, 32)[None, :]
    if BITS == 8:
        codes = tl.load(chunk + 32 * P + lanes, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        pairs = tl.load(chunk + 32 * (P // 2) + lanes, mask=inside, other=0).to(tl.int32)
        codes = (pairs >> (4 * (P % 2))) & 15
    else:
        low = tl.load(chunk + lanes, mask=inside, other=0).to(tl.int32)
        high = tl.load(chunk + 32 + lanes % 16, mask=inside, other=0).to(tl.int32)
        high = (high >> (4 * (lanes // 16))) & 15
        codes = ((low | (high << 8)) >> (3 * P)) & 7
    return codes


@triton.jit
def _matmul(
    x,  # [tokens, chunks * 128]
    data,
    scale,
    zero,
    out,  # [tokens, out]
    tokens,
    rows,
    chunks,
    groups,
    group_slots,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, present = (row < rows)[:, None], (token < tokens)[:, None]
    lanes = tl.arange(0, 32)[None, :]
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for chunk in range(chunks):
        place = data + (row[:, None] * chunks + chunk) * (16 * BITS)
        for p in tl.static_range(4):
            slot = chunk * 128 + 32 * p
            # Slots behind the last group meet columns of x that are 0.
            group = tl.minimum(slot // group_slots, groups - 1)
            step = tl.load(scale + row * groups + group, mask=row < rows, other=0.0)
            middle = tl.load(zero + row * groups + group, mask=row < rows, other=0)
            codes = _plane(place, inside, p, BITS) - middle.to(tl.int32)[:, None]
            part = tl.load(
                x + token[:, None] * (chunks * 128) + slot + lanes, mask=present, other=0.0
            )
            if (
                _IS_INTERPRETED
            ):  # whose products of bfloat16 are of the integers that stand for them
                part = part.to(tl.float32)
            codes = tl.trans(codes.to(part.dtype))
            products = tl.dot(part, codes, input_precision="ieee")
            sums += products * step.to(tl.float32)[None, :]
    place = out + token[:, None] * rows + row[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=present & (row < rows)[None, :])


@triton.jit
def _unpack(
    data,
    scale,
    zero,
    out,  # [out, in]
    rows,
    columns,
    chunks,
    groups,
    group_size,
    group_slots,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    inside = (row < rows)[:, None]
    place = data + (row[:, None] * chunks + chunk) * (16 * BITS)
    for p in tl.static_range(4):
        slot = chunk * 128 + 32 * p + tl.arange(0, 32)
        group = tl.minimum((chunk * 128 + 32 * p) // group_slots, groups - 1)
        step = tl.load(scale + row * groups + group, mask=row < rows, other=0.0)
        middle = tl.load(zero + row * groups + group, mask=row < rows, other=0)
        codes = _plane(place, inside, p, BITS) - middle.to(tl.int32)[:, None]
        values = codes.to(tl.float32) * step.to(tl.float32)[:, None]
        of_group = slot - group * group_slots
        column = group * group_size + of_group
        keep = inside & ((of_group < group_size) & (column < columns))[None, :]
        target = out + row[:, None] * columns + column[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=keep)


def unpack(packed: PackedWeight, out: Tensor) -> None:
    """Writes (code - zero) * scale to `out` [out, in]."""
    rows, chunks = packed.data.shape[:2]
    _unpack[(triton.cdiv(rows, _ROWS), chunks)](
        packed.data,
        packed.scale,
        packed.zero,
        out,
        rows,
        packed.in_features,
        chunks,
        packed.scale.shape[1],
        packed.group_size,
        slots_per_group(packed.group_size),
        BITS=packed.bits,
        ROWS=_ROWS,
        num_warps=_NUM_WARPS,
    )


def matmul(x: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Writes x [tokens, in] times the transposed weight to `out` [tokens, out]."""
    rows, chunks = packed.data.shape[:2]
    slots = slots_from_codes(x, packed.group_size).contiguous()
    tokens = min(128, max(16, triton.next_power_of_2(len(x))))
    _matmul[(triton.cdiv(rows, _ROWS), triton.cdiv(len(x), tokens))](
        slots,
        packed.data,
        packed.scale,
        packed.zero,
        out,
        len(x),
        rows,
        chunks,
        packed.scale.shape[1],
        slots_per_group(packed.group_size),
        BITS=packed.bits,
        TOKENS=tokens,
        ROWS=_ROWS,
        num_warps=_NUM_WARPS,
    )
