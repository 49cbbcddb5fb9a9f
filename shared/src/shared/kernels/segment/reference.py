"""Sparse times dense and CSR transposition in plain torch: the definition."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["segment_max", "segment_max_backward", "spmm", "spmm_backward", "transpose"]


def spmm(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    x: Tensor,
    mean: bool,
    out: Tensor,
    accumulate: bool,
) -> None:
    """Write, or add, the sum (or mean) of each row's columns of `x` to `out` [rows, dim]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    counts = indptr.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    terms = x[indices.long()].to(wide)
    if weight is not None:
        terms = terms * weight.to(wide)[:, None]
    total = torch.zeros(out.shape, dtype=wide, device=x.device).index_add_(0, rows, terms)
    if mean:
        total /= counts.clamp(min=1)[:, None]
    out.copy_(out.to(wide) + total if accumulate else total)


def transpose(indptr: Tensor, indices: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed `indptr` and `indices`, and which edge stands at each place of the transpose.

    Stable: edges of one column keep their order, so a transpose is sorted within its rows.
    """
    counts = torch.bincount(indices, minlength=num_cols)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = torch.sort(indices, stable=True).indices
    rows = torch.repeat_interleave(
        torch.arange(len(indptr) - 1, device=indptr.device), indptr.diff()
    )
    return ends, rows[order].to(indices.dtype), order


def spmm_backward(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, grad: Tensor, mean: bool, out: Tensor
) -> None:
    """Write the gradient of the columns [cols, dim] for that of the rows [rows, dim]."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    counts = indptr.diff()
    terms = grad.to(wide)
    if mean:
        terms = terms / counts.clamp(min=1)[:, None]
    terms = terms.repeat_interleave(counts, 0)
    if weight is not None:
        terms = terms * weight.to(wide)[:, None]
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    out.copy_(total.index_add_(0, indices.long(), terms))


def segment_max(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, x: Tensor, empty: float
) -> tuple[Tensor, Tensor]:
    """The maximum of each row's columns of `x`, and the first entry that has it (-1: none)."""
    out = x.new_full((len(indptr) - 1, x.shape[1]), empty)
    argmax = torch.full(out.shape, -1, dtype=torch.int64, device=x.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for row, (first, end) in enumerate(pairwise(indptr.tolist())):
        if first == end:
            continue
        terms = x[indices[first:end].long()].to(wide)
        if weight is not None:
            terms = terms * weight[first:end].to(wide)[:, None]
        top = terms.amax(0)
        out[row] = top
        # A NaN equals nothing, not even itself.
        is_top = (terms == top) | (terms.isnan() & top.isnan())
        argmax[row] = first + is_top.int().argmax(0)
    return out, argmax


def segment_max_backward(
    indices: Tensor, weight: Tensor | None, argmax: Tensor, grad: Tensor, out: Tensor
) -> None:
    """Write the gradient of the columns [cols, dim] for that of the maxima [rows, dim]."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    if len(indices):
        entries = argmax.clamp(min=0)
        terms = grad.to(wide).masked_fill(argmax < 0, 0)
        if weight is not None:
            terms = terms * weight.to(wide)[entries]
        total.scatter_add_(0, indices.long()[entries], terms)
    out.copy_(total)
