"""Quantise and dequantise in Triton, several rows a program, each row read once.

Compiled with `enable_fp_fusion=False`: a fused multiply-add would round once where the definition
rounds twice, and the integers would differ from the other forms'. For the same reason divisions are
`div_rn`: Triton's `/` on float32 is approximate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.philox import key_words
from shared.kernels.philox.gpu import noise_tile

__all__ = ["dequantize", "quantize"]

# Elements a program holds, and warps that share them. Chosen for occupancy (16 a thread), not
# tuned on a device.
_TILE = 2048
_NUM_WARPS = 4
_MAX_DIM = 1 << 15


@triton.jit
def _row_params(low, high, LEVELS: tl.constexpr, IS_BF16: tl.constexpr):  # noqa: ANN001, ANN202
    """Zero point, scale, 65536 / scale and whether a row is broken, of its ordered extremes."""
    broken = (high >= 0x7F800000) | (low <= -0x7F800001)
    low = low ^ ((low >> 31) & 0x7FFFFFFF)
    high = high ^ ((high >> 31) & 0x7FFFFFFF)
    zero = low.to(tl.float32, bitcast=True) + 0.0
    if IS_BF16:
        word = zero.to(tl.int32, bitcast=True)
        word = tl.where(word < 0, word + 0xFFFF, word) & -0x10000
        zero = word.to(tl.float32, bitcast=True)
    span = high.to(tl.float32, bitcast=True) - zero
    levels = tl.full(span.shape, LEVELS, tl.float32)
    scale = tl.div_rn(span, levels)
    word = scale.to(tl.int32, bitcast=True)
    word = tl.where(scale * levels < span, word + 1, word)
    if IS_BF16:
        word = (word + 0xFFFF) & -0x10000
    scale = word.to(tl.float32, bitcast=True)
    floor = tl.full(scale.shape, 2.0**-110, tl.float32)
    scale = tl.where(scale > floor, scale, floor)
    inverse = tl.div_rn(tl.full(scale.shape, 65536.0, tl.float32), scale)
    flat = span <= 0.0
    # A finite number minus itself is 0; infinities and NaN leave NaN.
    broken |= ((zero - zero) + (span - span) + (scale - scale)) != 0.0
    return zero, tl.where(flat, 0.0, scale), tl.where(flat | broken, 0.0, inverse), broken


# A key is no shape: specialising on its value would compile anew for some of them.
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _quantize(  # noqa: ANN202
    x,  # noqa: ANN001
    index,  # noqa: ANN001
    data,  # noqa: ANN001
    params,  # noqa: ANN001  as integers of the wire type's width
    num_rows,  # noqa: ANN001
    dim,  # noqa: ANN001
    width,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    key_low,  # noqa: ANN001
    key_high,  # noqa: ANN001
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    IS_BF16: tl.constexpr,
    IN_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    per: tl.constexpr = 8 // BITS
    levels: tl.constexpr = (1 << BITS) - 1
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    source = rows
    if HAS_INDEX:
        source = tl.load(index + rows, mask=live, other=0)
    cols = tl.arange(0, PAD)
    inside = live[:, None] & (cols < dim)[None, :]
    h = tl.load(x + source[:, None] * row_stride + cols[None, :], mask=inside, other=0.0)
    h = h.to(tl.float32)

    word = h.to(tl.int32, bitcast=True)
    ordered = word ^ ((word >> 31) & 0x7FFFFFFF)
    low = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), 1)
    high = tl.max(tl.where(inside, ordered, -0x80000000), 1)
    zero, scale, inverse, broken = _row_params(low, high, levels, IS_BF16)

    h = tl.where(inside & (broken == 0)[:, None], h, zero[:, None])
    h = tl.where(broken[:, None], 0.0, h - zero[:, None])
    fixed = (h * inverse[:, None] + 0.5).to(tl.int32)
    fixed = tl.minimum(fixed, levels << 16)
    if STOCHASTIC:
        k0 = key_low.to(tl.uint32)
        k1 = key_high.to(tl.uint32)
        fixed += noise_tile(source, k0, k1, ROWS, PAD)
    else:
        fixed += 32768
    codes = tl.where(inside & (broken == 0)[:, None], fixed >> 16, 0)

    places = tl.arange(0, WIDTH_PAD)
    if BITS == 8:
        packed = codes
    elif IN_PLANES:
        shifts = tl.reshape(tl.arange(0, per) * BITS, [1, per, 1])
        packed = tl.sum(tl.reshape(codes, [ROWS, per, WIDTH_PAD]) << shifts, 1)
    else:
        packed = tl.zeros([ROWS, WIDTH_PAD], tl.int32)
        for k in tl.static_range(per):
            column = tl.minimum(places + k * width, PAD - 1)
            # Columns from `dim` on hold 0; a place beyond the row is not stored.
            at = tl.broadcast_to(column[None, :], [ROWS, WIDTH_PAD])
            packed |= tl.gather(codes, at, 1) << (k * BITS)
    keep = live[:, None] & (places < width)[None, :]
    tl.store(data + rows[:, None] * width + places[None, :], packed.to(tl.uint8), mask=keep)

    nan = 0x7FC00000
    zero_word = tl.where(broken, nan, zero.to(tl.int32, bitcast=True))
    scale_word = tl.where(broken, nan, scale.to(tl.int32, bitcast=True))
    if IS_BF16:
        tl.store(params + rows * 2, (zero_word >> 16).to(tl.int16), mask=live)
        tl.store(params + rows * 2 + 1, (scale_word >> 16).to(tl.int16), mask=live)
    else:
        tl.store(params + rows * 2, zero_word, mask=live)
        tl.store(params + rows * 2 + 1, scale_word, mask=live)


@triton.jit
def _dequantize(  # noqa: ANN202
    data,  # noqa: ANN001
    params,  # noqa: ANN001  as integers of the wire type's width
    index,  # noqa: ANN001
    out,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    dim,  # noqa: ANN001
    width,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    BITS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    IS_BF16: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    target = rows
    if HAS_INDEX:
        target = tl.load(index + rows, mask=live, other=0)
    zero_word = tl.load(params + rows * 2, mask=live, other=0).to(tl.int32)
    scale_word = tl.load(params + rows * 2 + 1, mask=live, other=0).to(tl.int32)
    if IS_BF16:
        zero_word = zero_word << 16
        scale_word = scale_word << 16
    zero = zero_word.to(tl.float32, bitcast=True)
    scale = scale_word.to(tl.float32, bitcast=True)
    places = tl.arange(0, WIDTH_PAD)
    there = live[:, None] & (places < width)[None, :]
    packed = tl.load(data + rows[:, None] * width + places[None, :], mask=there, other=0)
    packed = packed.to(tl.int32)
    for k in tl.static_range(8 // BITS):
        codes = (packed >> (k * BITS)) & ((1 << BITS) - 1)
        values = codes.to(tl.float32) * scale[:, None] + zero[:, None]
        cols = places + k * width
        tl.store(
            out + target[:, None] * row_stride + cols[None, :],
            values.to(out.dtype.element_ty),
            mask=there & (cols < dim)[None, :],
        )


def quantize(
    x: Tensor,
    bits: int,
    key: int,
    index: Tensor | None,
    stochastic: bool,
    data: Tensor,
    params: Tensor,
) -> None:
    """Quantise rows of `x` into `data` [n, width] and `params` [n, 2].

    Raises:
        ConfigError: A row is longer than one program can hold.
    """
    if x.shape[1] > _MAX_DIM:
        raise ConfigError(
            f"expected at most {_MAX_DIM} columns a row in the Triton form, got {x.shape[1]}: "
            "cut the rows, or quantise on the CPU"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    width, per = data.shape[1], 8 // bits
    pad = max(128, triton.next_power_of_2(x.shape[1]))
    in_planes = width * per == pad
    rows = max(1, _TILE // pad)
    is_bf16 = params.dtype == torch.bfloat16
    # Signed, so that a key word has the same type whatever its value; the kernel reads the bits.
    key_low, key_high = (word - (1 << 32) if word >> 31 else word for word in key_words(key))
    _quantize[(triton.cdiv(len(data), rows),)](
        x,
        x if index is None else index.contiguous(),
        data,
        params.view(torch.int16 if is_bf16 else torch.int32),
        len(data),
        x.shape[1],
        width,
        x.stride(0),
        key_low,
        key_high,
        BITS=bits,
        STOCHASTIC=stochastic,
        HAS_INDEX=index is not None,
        IS_BF16=is_bf16,
        IN_PLANES=in_planes,
        ROWS=rows,
        PAD=pad,
        WIDTH_PAD=pad if bits == 8 else triton.next_power_of_2(width),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def dequantize(
    data: Tensor, params: Tensor, bits: int, out: Tensor, index: Tensor | None = None
) -> None:
    """Write zero + scale * code into `out`, or into its rows `index`, with two roundings."""
    buffer = out if out.stride(1) == 1 else out.contiguous()
    width_pad = triton.next_power_of_2(data.shape[1])
    rows = max(1, _TILE // (width_pad * (8 // bits)))
    is_bf16 = params.dtype == torch.bfloat16
    _dequantize[(triton.cdiv(len(data), rows),)](
        data,
        params.view(torch.int16 if is_bf16 else torch.int32),
        data if index is None else index.contiguous(),
        buffer,
        len(data),
        out.shape[1],
        data.shape[1],
        buffer.stride(0),
        BITS=bits,
        HAS_INDEX=index is not None,
        IS_BF16=is_bf16,
        ROWS=rows,
        WIDTH_PAD=width_pad,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    if buffer is not out:
        out.copy_(buffer)
