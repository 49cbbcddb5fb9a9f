"""The bytes of one message buffer: the width of each row, its place, and how it is checked.

A buffer holds the rows that one rank sends to one peer in one exchange. Rows of equal width form a
block. A header holds the version of the table of widths, on which sender and receiver must agree,
so that a receiver with an outdated table refuses the buffer. Scales and zero points precede the
blocks, where they are aligned. After AdaQP (arXiv 2306.01381), with one buffer instead of two and
without pickled index lists.

    header (version, bytes) | zero point and scale of each quantised row | 32 | 16 | 8 | 4 | 2 | 1 bits

A buffer whose rows are all sent in their own dtype has no header: it is received in place.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from adaqp.planner.widths import AS_IS, DROPPED, WIDTHS
from shared.errors import CommError, DataError
from shared.kernels.gather import gather
from shared.kernels.quantize import dequantize, packed_width, quantize

__all__ = ["HEADER_BYTES", "BufferLayout", "pack", "row_bytes", "unpack"]

HEADER_BYTES = 16


def row_bytes(bits: int, dim: int, itemsize: int, wire_dtype: torch.dtype) -> int:
    """Bytes sent for one row of `dim` values of `itemsize` bytes, parameters included."""
    if bits == DROPPED:
        return 0
    width = WIDTHS.get(bits)
    if width.is_quantised:
        return packed_width(dim, bits) + 2 * wire_dtype.itemsize
    return dim * (itemsize if width.dtype is None else getattr(torch, width.dtype).itemsize)


def _cast_dtype(bits: int, own: torch.dtype) -> torch.dtype:
    """The dtype in which rows of dtype `own` are sent at a width that is not quantised."""
    name = WIDTHS.get(bits).dtype
    return own if name is None else getattr(torch, name)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one width: their places in the message list and where their bytes lie."""

    bits: int
    positions: Tensor  # int64 [num_rows], ascending
    is_whole: bool  # covers every row of the list, in order
    start: int
    stop: int
    params: slice | None  # bytes of the parameters, None where rows are not quantised


@dataclass(frozen=True)
class BufferLayout:
    """Where each row of one message list lies in its buffer.

    Args:
        bits: uint8 [num_rows], the width of each row, in list order.
        dim: columns of a row.
        dtype: the rows' own dtype.
        wire_dtype: dtype of zero point and scale.
        version: number of the table of widths, compared on arrival.
    """

    bits: Tensor
    dim: int
    dtype: torch.dtype
    wire_dtype: torch.dtype
    version: int = 0

    @cached_property
    def is_raw(self) -> bool:
        """Whether every row is sent in its own dtype, so that the buffer holds only the rows."""
        return bool((self.bits == AS_IS).all())

    @cached_property
    def blocks(self) -> tuple[_Block, ...]:
        """Blocks of equal width, widest first; empty ones are left out."""
        rows = {b: (self.bits == b).nonzero().flatten() for b in sorted(WIDTHS, reverse=True)}
        quantised = {b for b in rows if WIDTHS.get(b).is_quantised}
        params_at = 0 if self.is_raw else HEADER_BYTES
        num_quantised = sum(len(rows[b]) for b in quantised)
        # Padded so that rows sent in their own dtype (up to 8 bytes per value) stay aligned.
        start = params_at + -(-num_quantised * 2 * self.wire_dtype.itemsize // 8) * 8
        blocks = []
        for bits, positions in rows.items():
            if not len(positions):
                continue
            params = None
            stop = start + len(positions) * row_bytes(
                bits, self.dim, self.dtype.itemsize, self.wire_dtype
            )
            if bits in quantised:
                num_params_bytes = len(positions) * 2 * self.wire_dtype.itemsize
                params = slice(params_at, params_at + num_params_bytes)
                params_at += num_params_bytes
                stop -= num_params_bytes
            is_whole = len(positions) == len(self.bits)
            blocks.append(_Block(bits, positions, is_whole, start, stop, params))
            start = stop
        return tuple(blocks)

    @cached_property
    def num_bytes(self) -> int:
        """Length of the buffer in bytes; 0 where nothing is sent."""
        return self.blocks[-1].stop if self.blocks else 0


def pack(
    layout: BufferLayout,
    x: Tensor,
    rows: Tensor,
    *,
    key: int,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    all_spreads: bool = False,
) -> tuple[Tensor, Tensor]:
    """Writes the rows `x[rows]` into a new buffer.

    Args:
        layout: the widths; one entry for each of `rows`.
        x: float tensor [num_local, dim].
        rows: int64 [num_rows], the rows to send, in list order.
        key: stream of the random numbers (`shared.kernels.philox.stream_key`).
        rounding: "stochastic" (unbiased) or "nearest".
        all_spreads: also measure the ranges of rows that are not quantised.

    Returns:
        The buffer, uint8 [layout.num_bytes], and max - min of each row, float32 [num_rows] (0 for
        rows that were not quantised, unless `all_spreads`).

    Raises:
        DataError: a quantised row holds NaN or infinity; `.args[1]` is its place in the list.
    """
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=x.device)
    spread = torch.zeros(len(rows), dtype=torch.float32, device=x.device)
    if layout.blocks and not layout.is_raw:
        header = torch.tensor([layout.version, layout.num_bytes], dtype=torch.int64)
        buffer[:HEADER_BYTES] = header.view(torch.uint8).to(x.device)
    for block in layout.blocks:
        index = rows if block.is_whole else rows[block.positions]
        body = buffer[block.start : block.stop]
        if block.params is None:
            dtype = _cast_dtype(block.bits, x.dtype)
            out = body.view(dtype).view(len(index), layout.dim)
            if dtype == x.dtype:
                gather(x, index, out=out)
            else:
                out.copy_(gather(x, index))
            if all_spreads:
                low, high = out.aminmax(dim=1)
                spread[block.positions] = (high - low).float()
            continue
        params = buffer[block.params].view(layout.wire_dtype).view(-1, 2)
        width = packed_width(layout.dim, block.bits)
        quantize(
            x,
            block.bits,
            key=key,
            index=index,
            rounding=rounding,
            wire_dtype=layout.wire_dtype,
            data=body.view(len(index), width),
            params=params,
        )
        block_spread = params[:, 1].float() * (2**block.bits - 1)
        if not bool(torch.isfinite(params).all()):
            bad = int((~torch.isfinite(params)).any(1).nonzero()[0])
            raise DataError("a row to be sent holds NaN or infinity", int(block.positions[bad]))
        spread[block.positions] = block_spread
    return buffer, spread


def unpack(layout: BufferLayout, buffer: Tensor, out: Tensor) -> None:
    """Writes the rows of a received buffer to `out`, in list order.

    Args:
        layout: the widths the receiver expects.
        buffer: uint8 [layout.num_bytes].
        out: float tensor [num_rows, dim]; rows of width 0 become zeros.

    Raises:
        CommError: the sender used another table of widths, or another length.
    """
    if layout.is_raw:
        out.copy_(buffer.view(layout.dtype).view(out.shape))
        return
    if sum(len(block.positions) for block in layout.blocks) < len(out):
        out.zero_()
    if not layout.blocks:
        return
    version, num_bytes = buffer[:HEADER_BYTES].cpu().view(torch.int64).tolist()
    if (version, num_bytes) != (layout.version, layout.num_bytes):
        raise CommError(
            f"expected a buffer of {layout.num_bytes} bytes packed by bit table {layout.version}, "
            f"got {num_bytes} bytes packed by table {version}: an update of the table was lost; "
            "resume from the last checkpoint"
        )
    for block in layout.blocks:
        body = buffer[block.start : block.stop]
        if block.params is None:
            dtype = _cast_dtype(block.bits, layout.dtype)
            rows = body.view(dtype).view(-1, layout.dim)
            if block.is_whole:
                out.copy_(rows)
            else:
                out[block.positions] = rows.to(out.dtype)
            continue
        params = buffer[block.params].view(layout.wire_dtype).view(-1, 2)
        data = body.view(len(block.positions), packed_width(layout.dim, block.bits))
        index = None if block.is_whole else block.positions
        dequantize(data, params, block.bits, layout.dim, out=out, index=index)
