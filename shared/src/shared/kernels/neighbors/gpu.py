"""Samples of in-edges in Triton, and numbers of nodes by torch's own operators."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.philox import key_words
from shared.kernels.philox.gpu import philox_words

__all__ = ["relabel", "sample"]

# Chosen positions of a program: in registers up to a fan-out of some thousand, slow beyond.
_TILE = 1024
_MAX_ROWS = 64


# A key is no shape: specialising on its value would compile anew for some of them.
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _sample(  # noqa: ANN202
    indptr,  # noqa: ANN001
    rows,  # noqa: ANN001
    offsets,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    fanout,  # noqa: ANN001
    key_low,  # noqa: ANN001
    key_high,  # noqa: ANN001
    ROWS: tl.constexpr,
    FANOUT: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = nth < num_rows
    row = tl.load(rows + nth, mask=is_row, other=0)
    degree = tl.load(indptr + row + 1, mask=is_row, other=0)
    degree -= tl.load(indptr + row, mask=is_row, other=0)
    is_drawn = is_row & (degree > fanout)
    k0 = key_low.to(tl.uint32)
    k1 = key_high.to(tl.uint32)
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros([ROWS], tl.uint32)
    columns = tl.arange(0, FANOUT)
    chosen = tl.full([ROWS, FANOUT], -1, tl.int64)
    for number in range(fanout):
        last = tl.maximum(degree - fanout + number, 0)
        # Two draws a call, of which each draw reads one: twice the work and no state.
        call = (zeros + number // 2).to(tl.uint32)
        w0, w1, w2, w3 = philox_words(low, high, call, zeros, k0, k1)
        is_second = (zeros + number % 2) > 0
        size = (last + 1).to(tl.uint64)
        lower = tl.where(is_second, w2, w0).to(tl.uint64)
        upper = tl.where(is_second, w3, w1).to(tl.uint64)
        offset = ((upper * size + ((lower * size) >> 32)) >> 32).to(tl.int64)
        is_taken = tl.max((chosen == offset[:, None]).to(tl.int32), 1) > 0
        offset = tl.where(is_taken, last, offset)
        chosen = tl.where(columns[None, :] == number, offset[:, None], chosen)
    chosen = tl.where(is_drawn[:, None], chosen, columns[None, :].to(tl.int64))
    is_column = columns < fanout
    place = offsets + nth[:, None] * fanout + columns[None, :]
    tl.store(place, chosen, mask=is_row[:, None] & is_column[None, :])


def sample(indptr: Tensor, rows: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """Up to `fanout` entries of each row (-1: all), ascending, and where each row's begin."""
    starts = indptr[rows]
    degrees = indptr[rows + 1] - starts
    largest = int(degrees.max()) if len(rows) else 0
    counts = degrees.clamp(max=fanout) if fanout >= 0 else degrees
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if fanout < 0 or fanout >= largest or not fanout:
        nth = torch.repeat_interleave(counts)
        within = torch.arange(len(nth), device=rows.device) - ends[nth]
        return ends, starts[nth] + within
    offsets = torch.empty(len(rows), fanout, dtype=torch.int64, device=rows.device)
    width = triton.next_power_of_2(fanout)
    block = min(_MAX_ROWS, max(1, _TILE // width))
    # Signed, so that a key word has the same type whatever its value; the kernel reads the bits.
    key_low, key_high = (word - (1 << 32) if word >> 31 else word for word in key_words(key))
    _sample[(triton.cdiv(len(rows), block),)](
        indptr,
        rows,
        offsets,
        len(rows),
        fanout,
        key_low,
        key_high,
        ROWS=block,
        FANOUT=width,
    )
    offsets = offsets.sort(1).values
    is_entry = torch.arange(fanout, device=rows.device) < counts[:, None]
    return ends, (starts[:, None] + offsets)[is_entry]


def relabel(
    ids: Tensor, num_nodes: int, first: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`first` and the new ids in order of first appearance, and each id's position in them."""
    both = torch.cat([first, ids])
    nodes, inverse = torch.unique(both, return_inverse=True)
    places = torch.arange(len(both), device=ids.device)
    appearance = torch.full_like(nodes, len(both)).scatter_reduce_(0, inverse, places, "amin")
    order = appearance.argsort()
    is_new = appearance[order] >= len(first)
    # Ids of `first` keep their places; new ones follow in the order of their first appearance.
    numbers = torch.where(is_new, len(first) + is_new.cumsum(0) - 1, appearance[order])
    number_of = torch.empty_like(nodes)
    number_of[order] = numbers
    return torch.cat([first, nodes[order[is_new]]]), number_of[inverse[len(first) :]]
