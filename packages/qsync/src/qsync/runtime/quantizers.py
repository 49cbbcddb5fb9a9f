"""Rounding of tensors to the numbers of a format, kept as ordinary floats.

A fixed-point format has one step for all elements that share a scale. A floating-point format has
a step for each element: 2^(e - m) with exponent e and m mantissa bits, from the smallest normal
exponent on. Rounding to nearest errs by step^2 / 12 in the mean square, stochastic rounding by
step^2 / 6 without a bias.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qsync.precisions import HIGHEST, check_precision
from shared.errors import ConfigError
from shared.kernels.scaled_matmul import FP8_MAX, INT8_MAX, quantize_rows

__all__ = [
    "CODE_DTYPES",
    "FLOAT_DTYPES",
    "check_rounding",
    "fake_quantize",
    "find_step",
    "round_rows",
]


FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, HIGHEST: torch.float32}
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Exponent of the smallest normal number and the largest number of each rounded float format.
_RANGES = {
    "fp8": (-6, FP8_MAX),
    "bf16": (-126, torch.finfo(torch.bfloat16).max),
    "fp16": (-14, torch.finfo(torch.float16).max),
}


def check_rounding(rounding: str) -> None:
    """Checks the name of a rounding.

    Raises:
        ConfigError: it is neither "stochastic" nor "nearest".
    """
    if rounding not in ("stochastic", "nearest"):
        raise ConfigError(f"rounding: expected 'stochastic' or 'nearest', got {rounding!r}")


def fake_quantize(
    x: Float[Tensor, "*shape"],
    precision: str,
    *,
    rounding: str = "stochastic",
    seed: int = 0,
) -> Float[Tensor, "*shape"]:
    """Rounds a tensor to the numbers of a format, with one scale for the tensor; not differentiable.

    int8 has scale absmax / 127. fp8 has a power of two as its scale, so that absmax lies within 448.
    A NaN or an infinity makes a tensor with a scale NaN; bf16 and fp16 keep it where it is.

    Args:
        x: any float type; float64 is rounded in float64, others in float32.
        precision: a name in `qsync.precisions.PRECISIONS`.
        rounding: "stochastic" is unbiased; "nearest" takes ties to even.
        seed: seed of the stochastic rounding. The global generators are left alone.

    Returns:
        The rounded tensor, in x's type.

    Raises:
        ConfigError: precision or rounding is unknown.
    """
    check_precision(precision)
    check_rounding(rounding)
    if precision == HIGHEST or not x.numel():
        return x.detach().clone()
    wide = _widen(x)
    step = find_step(wide, precision)
    if rounding == "nearest":
        units = (wide / step).round()
    else:
        generator = torch.Generator(x.device).manual_seed(seed)
        noise = torch.rand(x.shape, generator=generator, dtype=wide.dtype, device=x.device)
        units = (wide / step + noise).floor()
    if precision == "int8":
        return (units.clamp(-INT8_MAX, INT8_MAX) * step).to(x.dtype)
    rounded = units * step
    if precision == "fp8":
        limit = FP8_MAX * _find_scale(wide)
        return rounded.clamp(-limit, limit).to(x.dtype)
    # Rounded past the largest number, an element overflows.
    rounded = rounded.masked_fill(rounded > _RANGES[precision][1], torch.inf)
    rounded = rounded.masked_fill(rounded < -_RANGES[precision][1], -torch.inf)
    return torch.where(wide.isfinite(), rounded, wide).to(x.dtype)


def find_step(x: Float[Tensor, "*shape"], precision: str) -> Tensor:
    """Finds the distance of neighbouring numbers of a format around each element.

    Returns:
        A scalar for a fixed-point format, else a tensor of x's shape; 0 for float32.
    """
    format_ = check_precision(precision)
    wide = _widen(x)
    if precision == HIGHEST:
        return wide.new_zeros(())
    if format_.is_fixed:
        largest = _find_largest(wide)
        # As the kernel: a step that is no normal number would round to 0.
        step = (largest / INT8_MAX).clamp(min=torch.finfo(wide.dtype).tiny)
        return step.masked_fill(largest == 0, 1.0)
    lowest: Tensor | int = _RANGES[precision][0]
    if precision == "fp8":
        scale = _find_scale(wide)
        wide = wide * (scale / scale)  # NaN wherever the scale is
        lowest = lowest + torch.frexp(scale).exponent - 1
    exponent = torch.frexp(wide).exponent - 1
    exponent = torch.where(wide == 0, -200, exponent)
    exponent = torch.maximum(exponent, torch.as_tensor(lowest, device=x.device))
    step = torch.ldexp(torch.ones_like(wide), exponent - format_.mantissa_bits)
    return step.masked_fill(wide.isnan(), torch.nan)


def round_rows(x: Float[Tensor, "rows columns"], precision: str) -> Float[Tensor, "rows columns"]:
    """Rounds a matrix to nearest as the modules do: int8 and fp8 with a scale a row.

    Returns:
        The rounded matrix, in float32.
    """
    if precision in CODE_DTYPES:
        codes, scale = quantize_rows(x, CODE_DTYPES[precision])
        return codes.to(torch.float32) * scale[:, None]
    return x.detach().to(FLOAT_DTYPES[precision]).to(torch.float32)


def _widen(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _find_largest(wide: Tensor) -> Tensor:
    """The largest magnitude; NaN if an element is not finite."""
    if not wide.numel():
        return wide.new_zeros(())
    low, high = wide.aminmax()
    largest = torch.maximum(-low, high)
    return largest.masked_fill(~largest.isfinite(), torch.nan)


def _find_scale(wide: Tensor) -> Tensor:
    """The smallest power of two that brings a tensor within fp8's range."""
    largest = _find_largest(wide)
    mantissa, exponent = torch.frexp(largest / FP8_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(largest), exponent).masked_fill(largest == 0, 1.0)
    return scale.masked_fill(largest.isnan(), torch.nan)
