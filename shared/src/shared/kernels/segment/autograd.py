"""The aggregation over in-edges as a function that autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.kernels.registry import select
from shared.kernels.segment.csr import CSR

__all__ = ["Aggregate"]


class Aggregate(torch.autograd.Function):
    """`spmm` by "sum", "mean" or "max"; its backward sums into the columns that were read."""

    @staticmethod
    def forward(ctx: Any, csr: CSR, x: Tensor, reduce: str) -> Tensor:
        """The reduction over each row of `csr`."""
        form = select("segment", x.device)
        structure = csr.indptr, csr.indices, csr.weight
        ctx.csr, ctx.reduce, ctx.form = csr, reduce, form
        if reduce == "max":
            out, argmax = form.segment_max(*structure, x, 0.0)
            ctx.save_for_backward(argmax)
            return out
        out = x.new_empty(csr.num_rows, x.shape[1])
        if out.numel():
            form.spmm(*structure, x, reduce == "mean", out, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        """The gradient of the columns."""
        csr, form = ctx.csr, ctx.form
        (grad,) = grads
        out = grad.new_empty(csr.num_cols, grad.shape[1])
        structure = csr.indptr, csr.indices, csr.weight
        if ctx.reduce == "max":
            (argmax,) = ctx.saved_tensors
            form.segment_max_backward(*structure[1:], argmax, grad, out)
        else:
            form.spmm_backward(*structure, grad, ctx.reduce == "mean", out)
        return None, out, None
