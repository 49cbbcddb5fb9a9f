"""Products in a precision by name: a linear layer, a convolution, an embedding, a matrix product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from qsync.precisions import HIGHEST, check_precision
from qsync.runtime.functions import (
    Convolution,
    ConvolutionGeometry,
    Linear,
    Lookup,
    MatrixProduct,
)
from shared.errors import ConfigError, DataError

__all__ = ["convolve", "embed", "linear", "matmul"]


def linear(
    x: Float[Tensor, "*batch in"],
    weight: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    precision: str,
    scales: str = "row",
) -> Float[Tensor, "*batch out"]:
    """Multiplies x by the transposed weight in a precision, rounding factors to nearest.

    Args:
        x: input; the result has its type.
        weight: float32 master; its gradient is float32.
        bias: added to each row.
        precision: a name in `qsync.precisions.PRECISIONS`. fp8 saves memory, but no time on a CPU.
        scales: of int8 and fp8: "row", one for each row of x and of the weight, as modules have it,
            or "tensor", one for each of the two (coarser).

    Raises:
        ConfigError: precision or scales is unknown.
        DataError: x and weight differ in their last dimension.
    """
    check_precision(precision)
    if scales not in ("tensor", "row"):
        raise ConfigError(f"scales: expected 'tensor' or 'row', got {scales!r}")
    if x.shape[-1] != weight.shape[-1]:
        raise DataError(
            f"expected x of {weight.shape[-1]} columns for weight {list(weight.shape)}, got "
            f"{list(x.shape)}"
        )
    if precision == HIGHEST:
        return functional.linear(x, weight, bias)
    return Linear.apply(x, weight, bias, precision, scales == "tensor")


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvolutionGeometry,
    *,
    precision: str,
) -> Tensor:
    """Convolves x [batch, channels, *space] with weight [out, channels / groups, *kernel].

    int8 and fp8 have a scale a sample and one an output channel. Only int8 without groups runs on
    integer units; what a processor cannot multiply as codes it multiplies in bf16.
    """
    if x.ndim == len(geometry.stride) + 1:
        return convolve(x[None], weight, bias, geometry, precision=precision)[0]
    return Convolution.apply(x, weight, bias, precision, geometry)


def embed(
    indices: Tensor,
    weight: Float[Tensor, "rows dim"],
    padding_index: int | None,
    has_mean_grad: bool,
    *,
    precision: str,
) -> Tensor:
    """Reads rows of a table and rounds them, int8 and fp8 with a scale a row.

    Args:
        indices: rows to read, of any shape.
        weight: the table.
        padding_index: row that gets no gradient.
        has_mean_grad: divides a row's gradient by the number of its indices.
        precision: a name in `qsync.precisions.PRECISIONS`.
    """
    padding = -1 if padding_index is None else padding_index
    return Lookup.apply(indices, weight, precision, padding, has_mean_grad)


def matmul(a: Tensor, b: Tensor, *, precision: str) -> Tensor:
    """Multiplies a [*batch, rows, inner] by b [*batch, inner, columns] in a precision.

    int8 and fp8 have a scale a row of a and a column of b. Batches of codes are multiplied in bf16,
    which saves memory and no more time than bf16 does.

    Raises:
        ConfigError: precision is unknown.
        DataError: a or b has fewer than two dimensions, or their inner dimensions differ.
    """
    check_precision(precision)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise DataError(
            f"expected a [..., rows, inner] and b [..., inner, columns], got {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    if precision == HIGHEST:
        return a @ b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return MatrixProduct.apply(
        a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), precision
    )
