"""Rows by index, and rows added by index, on the CPU."""

import torch
from torch import Tensor

from shared.kernels.jit import compiled

__all__ = ["gather", "scatter_add"]


@compiled
def _scatter_add(out, index, src):  # noqa: ANN001, ANN202
    for i in range(index.size):
        row = index[i]
        for d in range(src.shape[1]):
            out[row, d] += src[i, d]


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write x[index[i]] to out[i]."""
    if out.dtype == x.dtype and out.is_contiguous():
        torch.index_select(x.detach(), 0, index, out=out)
    else:
        out.copy_(x.detach().index_select(0, index))


def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> None:
    """Add src[i] to out[index[i]], in the order of i, summing in at least float32."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    buffer = out.to(wide).contiguous()
    source = src.detach().to(wide).contiguous()
    _scatter_add(buffer.detach().numpy(), index.contiguous().numpy(), source.numpy())
    if buffer.data_ptr() != out.data_ptr():
        out.copy_(buffer)
