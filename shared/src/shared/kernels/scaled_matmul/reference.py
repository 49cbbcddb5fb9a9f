"""Codes of rows, and products of codes, in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["FP8_MAX", "INT8_MAX", "MIN_SCALE", "quantize_rows", "row_scale", "scaled_matmul"]

INT8_MAX = 127.0
FP8_MAX = 448.0
# The smallest normal float32: a row below it times 127 is rounded on a coarser grid.
MIN_SCALE = 2.0**-126


def row_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of rows with these largest magnitudes [rows]: 1 for zeros, NaN if not finite."""
    if dtype == torch.int8:
        scale = largest / INT8_MAX
    else:
        # Rounded up to a power of two: the next exponent unless all mantissa bits are 0.
        bits = (largest / FP8_MAX).view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = scale.clamp(min=MIN_SCALE).masked_fill(largest == 0, 1.0)
    return scale.masked_fill(~largest.isfinite(), torch.nan)


def quantize_rows(x: Tensor, largest: Tensor | None, codes: Tensor, scale: Tensor) -> None:
    """Writes the codes of x [rows, columns] and the scale of each row.

    `largest` [rows] replaces each row's own largest magnitude.
    """
    scale.copy_(row_scale(x.abs().amax(1) if largest is None else largest, codes.dtype))
    fractions = (x / scale[:, None]).masked_fill(scale.isnan()[:, None], 0.0)
    codes.copy_(fractions.round() if codes.dtype == torch.int8 else fractions)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Writes a [rows, columns] times b [b_rows, columns] transposed, scaled, plus bias, to `out`."""
    sums = (a.to(torch.float64) @ b.to(torch.float64).t()).to(torch.float32)
    sums = sums * a_scale[:, None] * b_scale
    out.copy_(sums if bias is None else sums + bias.to(torch.float32))
