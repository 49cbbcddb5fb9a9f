"""Kernels with scales, registered as torch operators so that `torch.compile` calls them whole."""

import torch
from torch import Tensor

from shared.kernels.scaled_matmul import ScaledRows
from shared.kernels.scaled_matmul import quantize_rows as _quantize_rows
from shared.kernels.scaled_matmul import scaled_matmul as _scaled_matmul

__all__ = ["quantize_rows", "scaled_matmul"]


@torch.library.custom_op("qsync::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, dtype: torch.dtype, has_one_scale: bool) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to codes and a scale a row, see `shared.kernels.scaled_matmul`."""
    codes, scale = _quantize_rows(x, dtype, scales="tensor" if has_one_scale else "row")
    return codes, scale


@quantize_rows.register_fake
def _(x: Tensor, dtype: torch.dtype, has_one_scale: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


@torch.library.custom_op("qsync::scaled_matmul", mutates_args=())
def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiplies codes by transposed codes, scaled, plus bias, see `shared.kernels.scaled_matmul`."""
    return _scaled_matmul(ScaledRows(a, a_scale), ScaledRows(b, b_scale), bias, dtype=dtype)


@scaled_matmul.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
