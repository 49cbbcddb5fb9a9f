"""Softmax over the edges of each row, and the parts of a weighted mean that can be merged; with autograd.

A part of a row's edges is summed up by its largest logit m, the sum t of e^(x - m) and the sum w of
e^(x - m) v. Parts merge by scaling t and w to the larger m and adding (as blocks do in
FlashAttention, arXiv 2205.14135); w / t of all is the mean of v weighted by the softmax of x.

A row without edges, or whose logits are all -inf, has weights 0 and the parts (-inf, 0, 0): what
changes nothing in a merge. Nothing here turns -inf into NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.errors import DataError
from shared.kernels.registry import select

__all__ = ["SoftmaxState", "edge_softmax", "softmax_state"]


class SoftmaxState(NamedTuple):
    """A weighted mean over the edges of each row, in parts that merge.

    Attributes:
        maximum: Largest logit [rows, heads]; -inf where there is no edge. Has no gradient.
        total: Sum of e^(logit - maximum) [rows, heads].
        weighted: Sum of e^(logit - maximum) value [rows, heads, dim].
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor


def edge_softmax(
    indptr: Int64[Tensor, " rows_and_one"], logits: Float[Tensor, "edges heads"]
) -> Float[Tensor, "edges heads"]:
    """Computes e^logit of each edge over the sum of its row's; once differentiable.

    Computes in float32, or float64 for float64 logits.

    Args:
        indptr: Edges of row r are indptr[r] to indptr[r + 1]; from 0 to the number of edges.
        logits: One for each edge and head.

    Returns:
        The weights, of the type of `logits`.

    Raises:
        DataError: `indptr` does not end at the number of edges.
    """
    _check_edges(indptr, len(logits))
    return _EdgeSoftmax.apply(indptr, logits)


def softmax_state(
    indptr: Int64[Tensor, " rows_and_one"],
    logits: Float[Tensor, "edges heads"],
    values: Float[Tensor, "edges heads dim"],
) -> SoftmaxState:
    """Sums up the edges of each row for a softmax that is merged later; once differentiable.

    Gradients reach `logits` and `values` through `total` and `weighted`, with `maximum` taken as a
    constant. They are exact for whatever does not depend on the choice of `maximum`, in particular
    for weighted / total after any merges, provided that the merges too take maxima as constants
    (detached). The gradient of `total` or of `weighted` alone is that for a fixed `maximum`.

    Args:
        indptr: Edges of row r are indptr[r] to indptr[r + 1]; from 0 to the number of edges.
        logits: One for each edge and head.
        values: A vector for each edge and head.

    Returns:
        The state, in float32, or in float64 if the values are.

    Raises:
        DataError: `indptr` does not end at the number of edges.
    """
    _check_edges(indptr, len(logits))
    return SoftmaxState(*_SoftmaxState.apply(indptr, logits, values))


def _check_edges(indptr: Tensor, num_edges: int) -> None:
    # On a GPU the check would make the host wait for the device.
    if indptr.device.type == "cpu" and (not len(indptr) or int(indptr[-1]) != num_edges):
        raise DataError(
            f"expected indptr to end at the number of edges, {num_edges}, got "
            f"{int(indptr[-1]) if len(indptr) else 'none'}"
        )


def _wide(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, contiguous, in the type in which `like` is summed."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return tensor.detach().to(wide).contiguous()


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indptr: Tensor, logits: Tensor) -> Tensor:
        form = select("edge_softmax", logits.device)
        weights = form.edge_softmax(indptr, _wide(logits, logits))
        ctx.save_for_backward(indptr, weights)
        ctx.form = form
        return weights.to(logits.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        indptr, weights = ctx.saved_tensors
        (grad,) = grads
        grad_logits = ctx.form.edge_softmax_backward(indptr, weights, _wide(grad, weights))
        return None, grad_logits.to(grad.dtype)


class _SoftmaxState(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, logits: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        form = select("edge_softmax", logits.device)
        rows = _wide(values, values)
        maximum, powers, total, weighted = form.softmax_state(indptr, _wide(logits, rows), rows)
        ctx.save_for_backward(indptr, powers, rows)
        ctx.form, ctx.dtypes = form, (logits.dtype, values.dtype)
        ctx.mark_non_differentiable(maximum)
        return maximum, total, weighted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        indptr, powers, values = ctx.saved_tensors
        _, grad_total, grad_weighted = (_wide(grad, values) for grad in grads)
        grad_logits, grad_values = ctx.form.softmax_state_backward(
            indptr, powers, values, grad_total, grad_weighted
        )
        of_logits, of_values = ctx.dtypes
        return None, grad_logits.to(of_logits), grad_values.to(of_values)
