"""Codes of rows, and products of codes, in Triton.

One program codes a row. A second kernel multiplies tiles on the int8 or fp8 units and applies scales
and bias to the sums while they lie in registers. Coding is a kernel of its own: inside the product
every tile of a row would be coded again for each tile of columns. Not tuned on a device.
"""

# ruff: noqa: ANN001, ANN202
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.scaled_matmul import reference

__all__ = ["quantize_rows", "scaled_matmul"]

_COLUMNS = 1024
_GROUP = 8
_INT8_MAX = tl.constexpr(reference.INT8_MAX)
_FP8_MAX = tl.constexpr(reference.FP8_MAX)
_MIN_SCALE = tl.constexpr(reference.MIN_SCALE)


@triton.jit
def _round_to_fp8(x):
    """Rounds to the nearest e4m3 value, ties to even; |x| <= 448.

    The conversion that follows is then exact. The interpreter's own conversion does not round
    to nearest.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2^-6 the grid's step is 2^-9, the last bit of a float32 between 2^14 and 2^15.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def _quantize_rows(
    x,  # [rows, columns]
    largest,  # [rows], read if HAS_LARGEST
    codes,
    scale,
    columns,
    HAS_LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COLUMNS)
    if HAS_LARGEST:
        bits = tl.load(largest + row).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        tops = tl.zeros([COLUMNS], tl.int32)
        for start in range(0, columns, COLUMNS):
            column = start + lanes
            part = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
            # As integers, magnitudes sort in their order, NaN and infinity on top.
            tops = tl.maximum(tops, part.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        bits = tl.max(tops, 0)
    is_finite = bits < 0x7F800000
    top = tl.where(is_finite, bits, 0).to(tl.float32, bitcast=True)
    if IS_INT8:
        step = tl.div_rn(top, _INT8_MAX)
    else:
        quotient = tl.div_rn(top, _FP8_MAX).to(tl.int32, bitcast=True)
        step = ((quotient + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.where(top == 0.0, 1.0, tl.maximum(step, _MIN_SCALE))
    tl.store(scale + row, tl.where(is_finite, step, float("nan")))
    for start in range(0, columns, COLUMNS):
        column = start + lanes
        part = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
        fraction = tl.div_rn(tl.where(is_finite, part, 0.0), step)
        if IS_INT8:
            # Adding 1.5 * 2^23 rounds to an integer, ties to even.
            code = ((fraction + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            code = _round_to_fp8(fraction).to(tl.float8e4nv)
        tl.store(codes + row * columns + column, code, mask=column < columns)


@triton.jit
def _scaled_matmul(
    a,  # [rows, columns]
    a_scale,
    b,  # [b_rows, columns]
    b_scale,
    bias,
    out,  # [rows, b_rows]
    rows,
    b_rows,
    columns,
    HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Neighbouring programs share GROUP tiles of rows, which stay in the cache.
    row_tiles, b_tiles = tl.cdiv(rows, ROWS), tl.cdiv(b_rows, B_ROWS)
    program = tl.program_id(0)
    first = program // (GROUP * b_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * b_tiles)
    row = ((first + inside % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b_row = ((inside // height) * B_ROWS + tl.arange(0, B_ROWS)).to(tl.int64)
    lanes = tl.arange(0, COLUMNS)
    has_row, has_b_row = row < rows, b_row < b_rows
    sums = tl.zeros([ROWS, B_ROWS], SUM)
    for start in range(0, columns, COLUMNS):
        has_column = start + lanes < columns
        left = tl.load(
            a + row[:, None] * columns + (start + lanes)[None, :],
            mask=has_row[:, None] & has_column[None, :],
            other=0.0,
        )
        right = tl.load(
            b + b_row[None, :] * columns + (start + lanes)[:, None],
            mask=has_b_row[None, :] & has_column[:, None],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, out_dtype=SUM)
    scaled = sums.to(tl.float32) * tl.load(a_scale + row, mask=has_row, other=0.0)[:, None]
    scaled *= tl.load(b_scale + b_row, mask=has_b_row, other=0.0)[None, :]
    if HAS_BIAS:
        scaled += tl.load(bias + b_row, mask=has_b_row, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * b_rows + b_row[None, :]
    tl.store(place, scaled.to(out.dtype.element_ty), mask=has_row[:, None] & has_b_row[None, :])


def quantize_rows(x: Tensor, largest: Tensor | None, codes: Tensor, scale: Tensor) -> None:
    """Writes the codes of x [rows, columns] and the scale of each row."""
    _quantize_rows[(len(x),)](
        x,
        scale if largest is None else largest,
        codes,
        scale,
        x.shape[1],
        HAS_LARGEST=largest is not None,
        IS_INT8=codes.dtype == torch.int8,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(x.shape[1])),
    )


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Writes a [rows, columns] times b [b_rows, columns] transposed, scaled, plus bias, to `out`."""
    (rows, columns), b_rows = a.shape, len(b)
    is_large = rows >= 1024 and b_rows >= 1024
    tile = (128, 256, 128) if is_large else (64, 64, 64)
    _scaled_matmul[(triton.cdiv(rows, tile[0]) * triton.cdiv(b_rows, tile[1]),)](
        a,
        a_scale,
        b,
        b_scale,
        out if bias is None else bias.contiguous(),
        out,
        rows,
        b_rows,
        columns,
        HAS_BIAS=bias is not None,
        SUM=tl.int32 if a.dtype == torch.int8 else tl.float32,
        ROWS=tile[0],
        B_ROWS=tile[1],
        COLUMNS=tile[2],
        GROUP=_GROUP,
        num_warps=8 if is_large else 4,
        num_stages=3,
    )
