"""Sparse times dense in Triton: one program a row and block of columns, several edges at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.segment.reference import (
    segment_max,
    segment_max_backward,
    spmm_backward,
    transpose,
)

__all__ = ["segment_max", "segment_max_backward", "spmm", "spmm_backward", "transpose"]

# Edges loaded together hide each other's latency; a guess, no device was at hand.
_EDGES = 8
_MAX_COLS = 256


@triton.jit
def _spmm(  # noqa: ANN202
    indptr,  # noqa: ANN001
    indices,  # noqa: ANN001
    weight,  # noqa: ANN001
    x,  # noqa: ANN001
    out,  # noqa: ANN001
    dim,  # noqa: ANN001
    x_stride,  # noqa: ANN001
    out_stride,  # noqa: ANN001
    HAS_WEIGHT: tl.constexpr,
    MEAN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SUM: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < dim
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    total = tl.zeros([EDGES, COLS], SUM)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        live = nth < count
        source = tl.load(indices + first + nth, mask=live, other=0).to(tl.int64)
        part = tl.load(
            x + source[:, None] * x_stride + cols[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(SUM)
        if HAS_WEIGHT:
            part *= tl.load(weight + first + nth, mask=live, other=0.0).to(SUM)[:, None]
        total += part
    result = tl.sum(total, 0)
    if MEAN:
        result = result / tl.maximum(count, 1).to(SUM)
    place = out + row * out_stride + cols
    if ACCUMULATE:
        result += tl.load(place, mask=inside, other=0.0).to(SUM)
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


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
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    buffer = out if out.stride(1) == 1 else out.contiguous()
    cols = min(_MAX_COLS, triton.next_power_of_2(x.shape[1]))
    _spmm[(len(out), triton.cdiv(x.shape[1], cols))](
        indptr,
        indices,
        x if weight is None else weight.detach(),
        x,
        buffer,
        x.shape[1],
        x.stride(0),
        buffer.stride(0),
        HAS_WEIGHT=weight is not None,
        MEAN=mean,
        ACCUMULATE=accumulate,
        SUM=tl.float64 if x.dtype == torch.float64 else tl.float32,
        EDGES=_EDGES,
        COLS=cols,
        num_warps=max(1, min(4, cols // 64)),
    )
    if buffer is not out:
        out.copy_(buffer)
