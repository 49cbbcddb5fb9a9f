"""Products in a lower precision, with autograd.

Forward, both factors are rounded to nearest and multiplied in the precision. Backward, the factors
are the rounded ones that forward saved: int8 and fp8 save codes, a quarter of float32's bytes. The
products of backward run in bf16 (fp16 for fp16). bf16 holds every int8 and fp8 code exactly, so a
scale multiplies the incoming gradient before that is rounded, and codes are never rescaled.
Gradients of weights leave in float32. Results leave in the input's type.

After LP-PyTorch of QSync (arXiv 2407.02327).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qsync.precisions import PRECISIONS
from qsync.runtime.operators import quantize_rows, scaled_matmul
from qsync.runtime.quantizers import CODE_DTYPES, FLOAT_DTYPES, round_rows
from shared.errors import DataError

__all__ = ["Convolution", "ConvolutionGeometry", "Linear", "Lookup", "MatrixProduct"]

Saved = tuple[Tensor, Tensor | None]
"""A rounded factor: its codes and a scale a row, or a 16-bit tensor and None."""


class ConvolutionGeometry(NamedTuple):
    """Where a convolution reads its input, one entry a dimension of space."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps an autocast around the model from casting the factors once more, to its own type."""

    @wraps(run)
    def call(ctx: Any, first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return run(ctx, first, *rest)

    return call


def _round(factor: Tensor, precision: str, has_one_scale: bool = False) -> Saved:
    if not factor.is_floating_point():
        raise DataError(f"expected factors of a float type, got {factor.dtype}; convert them first")
    if precision in CODE_DTYPES:
        rows = factor.flatten(1)
        codes, scale = quantize_rows(rows, CODE_DTYPES[precision], has_one_scale)
        return codes.view(factor.shape), scale
    return factor.to(FLOAT_DTYPES[precision]), None


def _save(ctx: Any, a: Saved, b: Saved) -> None:
    """Saves each factor of a product if the other one's gradient is asked for."""
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(*(a if needs_b else (None, None)), *(b if needs_a else (None, None)))


def _reshape(out: Tensor, shape: list[int]) -> Tensor:
    """A result in another shape, which operators in place may write to, unlike a view."""
    return torch.ops.aten._unsafe_view(out, shape)


def _backward_dtype(precision: str) -> torch.dtype:
    return FLOAT_DTYPES[PRECISIONS[precision].backward]


def _scale_dim(grad: Tensor, scale: Tensor | None, dim: int) -> Tensor:
    """Multiplies slices along `dim` by a scale each."""
    if scale is None:
        return grad
    shape = [1] * grad.ndim
    shape[dim] = -1
    return grad * scale.view(shape)


def _multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """A product of 16-bit matrices in float32; a CPU rounds its elements to 16 bits first."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(torch.float32)


class Linear(torch.autograd.Function):
    """x [..., in] times weight [out, in] transposed, plus bias."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: str,
        has_one_scale: bool,
    ) -> Tensor:
        """Multiplies rounded factors and saves them."""
        rows = x.reshape(-1, x.shape[-1])
        a, a_scale = _round(rows, precision, has_one_scale)
        b, b_scale = _round(weight, precision, has_one_scale)
        if a_scale is not None and b_scale is not None:
            out = scaled_matmul(a, a_scale, b, b_scale, bias, x.dtype)
        else:
            out = functional.linear(a, b, None if bias is None else bias.to(b.dtype)).to(x.dtype)
        _save(ctx, (a, a_scale), (b, b_scale))
        ctx.precision, ctx.dtypes = precision, (x.dtype, weight.dtype)
        return _reshape(out, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Multiplies the gradient by the saved factors."""
        a, a_scale, b, b_scale = ctx.saved_tensors
        dtype = _backward_dtype(ctx.precision)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _scale_dim(rows, b_scale, 1).to(dtype) @ b.to(dtype)
            grad_x = grad_x.to(ctx.dtypes[0]).view(*grad.shape[:-1], b.shape[1])
        if ctx.needs_input_grad[1]:
            scaled = _scale_dim(rows, a_scale, 0).to(dtype)
            grad_weight = _multiply_wide(scaled.t(), a.to(dtype)).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.to(torch.float32).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


class Convolution(torch.autograd.Function):
    """A convolution of x [batch, channels, *space]; scales belong to samples and output channels."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: str,
        geometry: ConvolutionGeometry,
    ) -> Tensor:
        """Convolves rounded factors and saves them."""
        a, a_scale = _round(x, precision)
        b, b_scale = _round(weight, precision)
        if a_scale is None or b_scale is None:
            small_bias = None if bias is None else bias.to(b.dtype)
            out = _convolve(a, b, small_bias, geometry).to(x.dtype)
        elif geometry.groups == 1 and (precision == "int8" or x.device.type == "cuda"):
            patches = _unfold(a, weight.shape[2:], geometry)
            positions = patches.shape[1:-1]
            patches = patches.reshape(-1, patches.shape[-1])
            scales = a_scale.repeat_interleave(positions.numel())
            out = scaled_matmul(patches, scales, b.flatten(1), b_scale, bias, x.dtype)
            out = out.view(x.shape[0], *positions, len(b)).movedim(-1, 1)
            out = out.clone(memory_format=torch.contiguous_format)
        else:
            # Nothing multiplies grouped int8, or fp8 on a CPU: bf16 holds the codes exactly.
            out = _convolve(a.to(torch.bfloat16), b.to(torch.bfloat16), None, geometry)
            out = _scale_dim(_scale_dim(out.to(torch.float32), a_scale, 0), b_scale, 1)
            out = (out if bias is None else out + bias.view(-1, *[1] * (x.ndim - 2))).to(x.dtype)
        _save(ctx, (a, a_scale), (b, b_scale))
        ctx.precision, ctx.geometry, ctx.dtypes = precision, geometry, (x.dtype, weight.dtype)
        ctx.shapes = x.shape, weight.shape
        return out

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Convolves the gradient with the saved factors."""
        a, a_scale, b, b_scale = ctx.saved_tensors
        dtype = _backward_dtype(ctx.precision)
        stride, padding, dilation, groups = ctx.geometry
        x_shape, weight_shape = ctx.shapes

        def multiply(scaled: Tensor, mask: list[bool]) -> Any:
            space = [0] * len(stride)
            scaled = scaled.to(dtype)
            # What is not saved is not read: only its shape counts.
            return torch.ops.aten.convolution_backward(
                scaled,
                scaled.new_empty(()).expand(x_shape) if a is None else a.to(dtype),
                scaled.new_empty(()).expand(weight_shape) if b is None else b.to(dtype),
                None,
                stride,
                padding,
                dilation,
                False,
                space,
                groups,
                mask,
            )

        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(_scale_dim(grad, b_scale, 1), [True, False, False])[0]
            grad_x = grad_x.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(_scale_dim(grad, a_scale, 0), [False, True, False])[1]
            grad_weight = grad_weight.to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            grad_bias = grad.to(torch.float32).transpose(0, 1).flatten(1).sum(1)
        return grad_x, grad_weight, grad_bias, None, None


class Lookup(torch.autograd.Function):
    """Rounded rows of a table; only the indices are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: Tensor,
        weight: Tensor,
        precision: str,
        padding_index: int,
        has_mean_grad: bool,
    ) -> Tensor:
        """Reads the rows and rounds each of them."""
        ctx.save_for_backward(indices)
        ctx.settings = (weight.shape[0], padding_index, has_mean_grad)
        ctx.dtype = weight.dtype
        rows = weight.index_select(0, indices.reshape(-1))
        if precision in CODE_DTYPES:
            codes, scale = _round(rows, precision)
            rows = _scale_dim(codes.to(torch.float32), scale, 0)
        else:
            rows = round_rows(rows, precision)
        return _reshape(rows.to(weight.dtype), [*indices.shape, weight.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Adds the gradients of equal indices in float32."""
        (indices,) = ctx.saved_tensors
        wide = grad.to(torch.float32)
        grad_weight = torch.ops.aten.embedding_dense_backward(wide, indices, *ctx.settings)
        return None, grad_weight.to(ctx.dtype), None, None, None


class MatrixProduct(torch.autograd.Function):
    """a [*batch, rows, inner] times b [*batch, inner, columns], with equal batch dimensions."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: str) -> Tensor:
        """Multiplies rounded factors and saves them; scales belong to rows of a and columns of b."""
        left, right = a, b.transpose(-1, -2)
        left_rows, right_rows = (each.reshape(-1, each.shape[-1]) for each in (left, right))
        codes, left_scale = _round(left_rows, precision)
        right_codes, right_scale = _round(right_rows, precision)
        if left_scale is not None and right_scale is not None and a.ndim == 2:
            out = scaled_matmul(codes, left_scale, right_codes, right_scale, None, a.dtype)
            left, right = codes, right_codes
        else:
            left, right = codes.view(left.shape), right_codes.view(right.shape)
            dtype = _backward_dtype(precision)
            out = left.to(dtype) @ right.to(dtype).transpose(-1, -2)
            if left_scale is not None and right_scale is not None:
                out = out.to(torch.float32) * left_scale.view(*left.shape[:-1], 1)
                out = out * right_scale.view(*right.shape[:-2], 1, right.shape[-2])
            out = out.to(a.dtype)
        _save(ctx, (left, left_scale), (right, right_scale))
        ctx.precision, ctx.dtypes = precision, (a.dtype, b.dtype)
        return out

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Multiplies the gradient by the saved factors."""
        left, left_scale, right, right_scale = ctx.saved_tensors
        dtype = _backward_dtype(ctx.precision)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            scaled = grad
            if right_scale is not None:
                scaled = grad * right_scale.view(*right.shape[:-2], 1, right.shape[-2])
            grad_a = (scaled.to(dtype) @ right.to(dtype)).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            scaled = grad
            if left_scale is not None:
                scaled = grad * left_scale.view(*left.shape[:-1], 1)
            grad_b = left.to(dtype).transpose(-1, -2) @ scaled.to(dtype)
            grad_b = grad_b.to(ctx.dtypes[1])
        return grad_a, grad_b, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Tensor:
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[x.ndim - 3]
    return convolve(x, weight, bias, *geometry)


def _unfold(codes: Tensor, kernel: torch.Size, geometry: ConvolutionGeometry) -> Tensor:
    """The patches of codes [batch, channels, *space] as [batch, *positions, channels * kernel]."""
    # As bytes: fp8 has no padding of its own, and its zero is the byte 0.
    patches = codes.view(torch.int8)
    margins = [width for padding in reversed(geometry.padding) for width in (padding, padding)]
    patches = functional.pad(patches, margins)
    for index, size in enumerate(kernel):
        step = geometry.dilation[index]
        patches = patches.unfold(index + 2, step * (size - 1) + 1, geometry.stride[index])
        patches = patches[..., ::step]
    space = len(kernel)
    order = [0, *range(2, 2 + space), 1, *range(2 + space, 2 + 2 * space)]
    return patches.permute(order).flatten(1 + space).view(codes.dtype)
