"""Sparse times dense and CSR transposition in numba."""

import numpy as np
import torch
from torch import Tensor

from shared.kernels._jit import compiled
from shared.kernels._rows import num_tasks, over_ranges

__all__ = ["spmm", "transpose"]


@compiled
def _spmm(  # noqa: ANN202
    indptr,  # noqa: ANN001
    indices,  # noqa: ANN001
    weight,  # noqa: ANN001
    x,  # noqa: ANN001
    mean,  # noqa: ANN001
    out,  # noqa: ANN001
    accumulate,  # noqa: ANN001
    start,  # noqa: ANN001
    stop,  # noqa: ANN001
):
    dim = x.shape[1]
    total = np.empty(dim, x.dtype)
    for row in range(start, stop):
        first = indptr[row]
        last = indptr[row + 1]
        total[:] = 0
        for edge in range(first, last):
            col = indices[edge]
            if weight.size:
                factor = weight[edge]
                for d in range(dim):
                    total[d] += factor * x[col, d]
            else:
                for d in range(dim):
                    total[d] += x[col, d]
        if mean and last > first:
            for d in range(dim):
                total[d] /= last - first
        if accumulate:
            for d in range(dim):
                out[row, d] += total[d]
        else:
            for d in range(dim):
                out[row, d] = total[d]


@compiled
def _transpose(indptr, indices, num_cols):  # noqa: ANN001, ANN202
    ends = np.zeros(num_cols + 1, np.int64)
    for edge in range(indices.size):
        ends[indices[edge] + 1] += 1
    for col in range(num_cols):
        ends[col + 1] += ends[col]
    place = ends[:-1].copy()
    rows = np.empty_like(indices)
    order = np.empty(indices.size, np.int64)
    for row in range(indptr.size - 1):
        for edge in range(indptr[row], indptr[row + 1]):
            at = place[indices[edge]]
            place[indices[edge]] = at + 1
            rows[at] = row
            order[at] = edge
    return ends, rows, order


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
    buffer = out
    if out.dtype != wide or not out.is_contiguous():
        buffer = out.to(wide).contiguous() if accumulate else torch.empty(out.shape, dtype=wide)
    source = x.detach().to(wide).contiguous().numpy()
    factors = np.empty(0, source.dtype)
    if weight is not None:
        factors = weight.detach().to(wide).numpy()
    ptr, ids, target = indptr.numpy(), indices.numpy(), buffer.detach().numpy()

    def run(start: int, stop: int) -> None:
        _spmm(ptr, ids, factors, source, mean, target, accumulate, start, stop)

    # Cut by edges, not by rows: degrees are skewed.
    tasks = num_tasks(len(ids) * x.shape[1] * source.itemsize)
    cuts = np.searchsorted(ptr, [len(ids) * i // tasks for i in range(1, tasks)])
    over_ranges(run, [0, *(int(cut) for cut in cuts), len(out)])
    if buffer is not out:
        out.copy_(buffer)


def transpose(indptr: Tensor, indices: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed `indptr` and `indices`, and which edge stands at each place of the transpose.

    A counting sort, O(nnz + num_cols): 3 M edges take some 30 ms where a stable sort takes 250.
    """
    ends, rows, order = _transpose(indptr.numpy(), indices.numpy(), num_cols)
    return torch.from_numpy(ends), torch.from_numpy(rows), torch.from_numpy(order)
