"""Rows by index, and rows added by index, in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["gather", "scatter_add"]


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write x[index[i]] to out[i]."""
    out.copy_(x[index.to(x.device)])


def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> None:
    """Add src[i] to out[index[i]], summing in at least float32."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    out.copy_(out.to(wide).index_add(0, index, src.to(wide)))
