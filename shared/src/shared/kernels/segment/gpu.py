"""Sparse times dense in Triton: one program a row and block of columns, several edges at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.segment.reference import segment_max_backward, transpose

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


@triton.jit
def _segment_max(  # noqa: ANN202
    indptr,  # noqa: ANN001
    indices,  # noqa: ANN001
    weight,  # noqa: ANN001
    x,  # noqa: ANN001
    out,  # noqa: ANN001
    argmax,  # noqa: ANN001
    dim,  # noqa: ANN001
    x_stride,  # noqa: ANN001
    empty,  # noqa: ANN001
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < dim
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    top = tl.full([EDGES, COLS], float("-inf"), WIDE)
    # Each lane's first entry with its maximum; `count` until it has one.
    position = tl.zeros([EDGES, COLS], tl.int32) + count
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        live = nth < count
        source = tl.load(indices + first + nth, mask=live, other=0).to(tl.int64)
        term = tl.load(
            x + source[:, None] * x_stride + cols[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(WIDE)
        if HAS_WEIGHT:
            term *= tl.load(weight + first + nth, mask=live, other=0.0).to(WIDE)[:, None]
        is_larger = (term > top) | ((term != term) & (top == top)) | (position == count)  # noqa: PLR0124  NaN
        is_larger = is_larger & live[:, None]
        top = tl.where(is_larger, term, top)
        position = tl.where(is_larger, nth[:, None], position)
    is_nan = top != top  # noqa: PLR0124  NaN
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), top), 0)
    is_top = tl.where(has_nan[None, :], is_nan, top == largest[None, :])
    position = tl.min(tl.where(is_top, position, count), 0)
    largest = tl.where(has_nan, float("nan"), largest)
    value = tl.where(count > 0, largest, empty)
    entry = tl.where(count > 0, first + position, -1)
    tl.store(out + row * dim + cols, value.to(out.dtype.element_ty), mask=inside)
    tl.store(argmax + row * dim + cols, entry, mask=inside)


def segment_max(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, x: Tensor, empty: float
) -> tuple[Tensor, Tensor]:
    """The maximum of each row's columns of `x`, and the first entry that has it (-1: none)."""
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    out = x.new_empty(len(indptr) - 1, x.shape[1])
    argmax = torch.empty(out.shape, dtype=torch.int64, device=x.device)
    if not out.numel():
        return out, argmax
    cols = min(_MAX_COLS, triton.next_power_of_2(x.shape[1]))
    _segment_max[(len(out), triton.cdiv(x.shape[1], cols))](
        indptr,
        indices,
        x if weight is None else weight.detach(),
        x,
        out,
        argmax,
        x.shape[1],
        x.stride(0),
        empty,
        HAS_WEIGHT=weight is not None,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        EDGES=_EDGES,
        COLS=cols,
        num_warps=max(1, min(4, cols // 64)),
    )
    return out, argmax


def spmm_backward(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, grad: Tensor, mean: bool, out: Tensor
) -> None:
    """Write the gradient of the columns [cols, dim] for that of the rows [rows, dim]."""
    if mean:
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        grad = grad.to(wide) / indptr.diff().clamp(min=1)[:, None]
    ends, rows, order = transpose(indptr, indices, len(out))
    spmm(ends, rows, None if weight is None else weight[order], grad, False, out, False)
