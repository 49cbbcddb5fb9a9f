"""Sparse times dense and CSR transposition in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["spmm", "transpose"]


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
