"""Quantise and dequantise in plain torch: the definition, to the bit."""

import torch
from torch import Tensor

from shared.kernels.philox import philox

__all__ = ["MIN_SCALE", "dequantize", "noise", "quantize", "row_params"]

# 65536 / scale must stay finite; a narrower row is coded on this coarser grid, still unbiased.
MIN_SCALE = 2.0**-110


def noise(counters: Tensor, dim: int, key: int) -> Tensor:
    """16-bit noise [n, dim] (int32) of the rows with these counters (int64 [n]).

    One Philox call serves eight columns: column j takes 16-bit lane (j % 128) // 16 of call
    16 * (j // 128) + j % 16, whatever the bit width, and so draws the same noise in each of them.
    """
    blocks = -(-dim // 128)
    counter = torch.zeros(len(counters), blocks * 16, 4, dtype=torch.int64, device=counters.device)
    counter[..., 0] = (counters & 0xFFFFFFFF)[:, None]
    counter[..., 1] = ((counters >> 32) & 0xFFFFFFFF)[:, None]
    counter[..., 2] = torch.arange(blocks * 16, device=counters.device)
    words = philox(counter, key)
    lanes = torch.stack([words & 0xFFFF, words >> 16], -1).view(len(counters), blocks, 16, 8)
    return lanes.transpose(2, 3).reshape(len(counters), blocks * 128)[:, :dim].to(torch.int32)


def row_params(rows: Tensor, levels: int, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zero point and scale of each row [n, dim] (float32), as the wire type holds them.

    The zero point is rounded down and the scale up, so that every column of the row lies within
    the grid that the receiver will rebuild. Both are NaN where the row, its range or a rounded
    parameter is not finite.
    """
    zero = rows.amin(1) + 0.0  # -0.0 becomes 0.0
    if wire_dtype == torch.bfloat16:
        bits = zero.view(torch.int32)
        zero = (torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)
    span = rows.amax(1) - zero
    scale = span / levels
    bits = scale.view(torch.int32)
    bits = torch.where(scale * levels < span, bits + 1, bits)
    if wire_dtype == torch.bfloat16:
        bits = (bits + 0xFFFF) & -0x10000
    scale = torch.where(span > 0, bits.view(torch.float32).clamp(min=MIN_SCALE), 0.0)
    broken = ~(rows.isfinite().all(1) & zero.isfinite() & span.isfinite() & scale.isfinite())
    return zero.masked_fill(broken, torch.nan), scale.masked_fill(broken, torch.nan)


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
    counters = torch.arange(len(data), device=x.device) if index is None else index
    rows = (x if index is None else x[index]).to(torch.float32)
    levels = 2**bits - 1
    zero, scale = row_params(rows, levels, params.dtype)
    # 16 fractional bits: after this product everything is an integer.
    inverse = torch.where(scale > 0, 65536.0 / scale, 0.0)
    fixed = ((rows - zero[:, None]) * inverse[:, None] + 0.5).nan_to_num(0.0).to(torch.int32)
    fixed = fixed.clamp(max=levels << 16)
    fixed += noise(counters, x.shape[1], key) if stochastic else 32768
    codes = torch.where(scale.isnan()[:, None], 0, fixed >> 16)

    per = 8 // bits
    padded = torch.zeros(len(rows), data.shape[1] * per, dtype=torch.int32, device=x.device)
    padded[:, : x.shape[1]] = codes
    planes = padded.view(len(rows), per, data.shape[1])
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=x.device)
    data.copy_((planes << shifts[:, None]).sum(1))
    params[:, 0] = zero
    params[:, 1] = scale


def dequantize(
    data: Tensor, params: Tensor, bits: int, out: Tensor, index: Tensor | None = None
) -> None:
    """Write zero + scale * code into `out`, or into its rows `index`, with two roundings."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    codes = (data[:, None, :] >> shifts[:, None]) & (2**bits - 1)
    codes = codes.reshape(len(data), -1)[:, : out.shape[1]].to(torch.float32)
    zero, scale = params.to(torch.float32).unbind(1)
    values = (codes * scale[:, None] + zero[:, None]).to(out.dtype)
    out[... if index is None else index] = values
