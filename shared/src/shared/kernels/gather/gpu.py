"""Rows by index, and rows added by index, in Triton: a tile of rows and columns a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather", "scatter_add"]

# A guess, no device was at hand.
_TILE = 2048
_MAX_COLS = 512


@triton.jit
def _gather(  # noqa: ANN202
    x,  # noqa: ANN001
    index,  # noqa: ANN001
    out,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    dim,  # noqa: ANN001
    x_stride,  # noqa: ANN001
    out_stride,  # noqa: ANN001
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = rows < num_rows
    inside = live[:, None] & (cols < dim)[None, :]
    source = tl.load(index + rows, mask=live, other=0)
    values = tl.load(x + source[:, None] * x_stride + cols[None, :], mask=inside)
    tl.store(out + rows[:, None] * out_stride + cols[None, :], values, mask=inside)


@triton.jit
def _scatter_add(  # noqa: ANN202
    out,  # noqa: ANN001
    index,  # noqa: ANN001
    src,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    dim,  # noqa: ANN001
    out_stride,  # noqa: ANN001
    src_stride,  # noqa: ANN001
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = rows < num_rows
    inside = live[:, None] & (cols < dim)[None, :]
    target = tl.load(index + rows, mask=live, other=0)
    values = tl.load(src + rows[:, None] * src_stride + cols[None, :], mask=inside, other=0.0)
    place = out + target[:, None] * out_stride + cols[None, :]
    tl.atomic_add(place, values.to(out.dtype.element_ty), mask=inside, sem="relaxed")


def _blocks(num_rows: int, dim: int) -> tuple[tuple[int, int], int, int]:
    cols = min(_MAX_COLS, triton.next_power_of_2(dim))
    rows = max(1, _TILE // cols)
    return (triton.cdiv(num_rows, rows), triton.cdiv(dim, cols)), rows, cols


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write x[index[i]] to out[i]."""
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    is_direct = out.dtype == x.dtype and out.stride(1) == 1
    buffer = out if is_direct else torch.empty(out.shape, dtype=x.dtype, device=out.device)
    grid, rows, cols = _blocks(len(index), x.shape[1])
    _gather[grid](
        x,
        index.contiguous(),
        buffer,
        len(index),
        x.shape[1],
        x.stride(0),
        buffer.stride(0),
        ROWS=rows,
        COLS=cols,
    )
    if buffer is not out:
        out.copy_(buffer)


def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> None:
    """Add src[i] to out[index[i]] by atomic additions, summing in at least float32."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    buffer = out if out.dtype == wide and out.stride(1) == 1 else out.to(wide).contiguous()
    src = src.detach() if src.stride(1) == 1 else src.detach().contiguous()
    grid, rows, cols = _blocks(len(index), out.shape[1])
    _scatter_add[grid](
        buffer,
        index.contiguous(),
        src,
        len(index),
        out.shape[1],
        buffer.stride(0),
        src.stride(0),
        ROWS=rows,
        COLS=cols,
    )
    if buffer is not out:
        out.copy_(buffer)
