"""Log-probabilities of tokens in Triton: blocks of logits in registers, from tensor cores.

Forward, a program takes some rows through a fixed share of the vocabulary and keeps four sums a
row; shares are merged after. Backward, a tile of logits is made again and its slopes are written,
for as many columns of the vocabulary as fit a buffer of fixed size; torch multiplies that by the
head and by the states. Gradients a program could keep in registers would be of few columns of D,
and every D / columns-th program would have to make the same logits again; sums by atomics would
have no order.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.token_log_probs.blocks import block_of, summed_products
from shared.kernels.token_log_probs.sums import merge

__all__ = ["gradients", "partial_sums"]

# Tiles by the bytes of an element, for the shared memory of an H100; guesses, no device was at hand.
TILES = {
    2: {"ROWS": 128, "COLS": 128, "DIMS": 64, "num_warps": 8, "num_stages": 3},
    4: {"ROWS": 64, "COLS": 64, "DIMS": 32, "num_warps": 4, "num_stages": 3},
}
# Shares of the vocabulary: a number, so that what is kept of a row does not grow with it.
MOST_SHARES = 32
# Of a block of slopes: 128 MB in half types.
MOST_ROWS = 1 << 14
MOST_LOGITS = 1 << 26

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _logits(
    hidden,
    weight,
    row,
    col,
    dim,
    temperature,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """A tile [ROWS, COLS] in float32."""
    nth = tl.arange(0, DIMS)
    states = hidden + row.to(tl.int64)[:, None] * dim + nth[None, :]
    heads = weight + col.to(tl.int64)[None, :] * dim + nth[:, None]
    logits = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, dim, DIMS):
        is_dim = nth < dim - start
        state = tl.load(states + start, mask=is_dim[None, :], other=0.0)
        head = tl.load(heads + start, mask=is_dim[:, None], other=0.0)
        if _IS_INTERPRETED:  # whose products of bfloat16 are of the integers that stand for them
            state, head = state.to(tl.float32), head.to(tl.float32)
        logits = tl.dot(state, head, logits, input_precision="ieee")
    return logits / temperature


@triton.jit
def _sums(
    hidden,  # [rows, dim]
    weight,  # [cols, dim]
    tokens,  # int64 [rows]
    sums,  # float32 [4, shares, rows]
    num_rows,
    num_cols,
    dim,
    temperature,
    share,  # columns of a program, a multiple of COLS
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIMS: tl.constexpr,
):
    # Programs that run side by side are of neighbouring rows: they read the same head. Beyond the
    # end the last row or column is read again: masks of both would be held in registers.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, num_rows - 1)
    token = tl.load(tokens + near)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, num_cols), COLS):
        col = start + tl.arange(0, COLS)
        is_col = (col < num_cols)[None, :]
        logits = _logits(
            hidden, weight, near, tl.minimum(col, num_cols - 1), dim, temperature,
            ROWS, COLS, DIMS,
        )  # fmt: skip
        is_chosen = (col[None, :] == token[:, None]) & is_col
        chosen += tl.sum(tl.where(is_chosen, logits, 0.0), 1)
        higher = tl.maximum(top, tl.max(logits, 1))
        shifted = logits - higher[:, None]
        exp = tl.where(is_col, tl.exp(shifted), 0.0)
        # Before the first columns there is no top, and nothing to shrink.
        shift = tl.where(top == float("-inf"), 0.0, top - higher)
        shrunk = tl.exp(shift)
        moment = shrunk * (moment + shift * total) + tl.sum(exp * shifted, 1)
        total = shrunk * total + tl.sum(exp, 1)
        top = higher
    place = sums + tl.program_id(1).to(tl.int64) * num_rows + row
    step = tl.num_programs(1).to(tl.int64) * num_rows
    is_row = row < num_rows
    tl.store(place, top, mask=is_row)
    tl.store(place + step, total, mask=is_row)
    tl.store(place + 2 * step, moment, mask=is_row)
    tl.store(place + 3 * step, chosen, mask=is_row)


@triton.jit
def _slopes(
    hidden,  # [rows, dim]
    weight,  # [cols, dim]
    tokens,  # int64 [rows]
    terms,  # float32 [4, rows]: normalizer, level, tilt and what the token has beside
    slopes,  # [rows, cols]
    num_rows,
    num_cols,
    dim,
    temperature,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    near = tl.minimum(row, num_rows - 1)
    log_p = _logits(
        hidden, weight, near, tl.minimum(col, num_cols - 1), dim, temperature, ROWS, COLS, DIMS
    )
    log_p -= tl.load(terms + near)[:, None]
    level = tl.load(terms + num_rows + near)[:, None]
    tilt = tl.load(terms + 2 * num_rows + near)[:, None]
    beside = tl.load(terms + 3 * num_rows + near)[:, None]
    is_chosen = col[None, :] == tl.load(tokens + near)[:, None]
    value = tl.exp(log_p) * (level + tilt * log_p) + tl.where(is_chosen, beside, 0.0)
    tl.store(
        slopes + row.to(tl.int64)[:, None] * num_cols + col[None, :],
        value.to(slopes.dtype.element_ty),
        mask=(row < num_rows)[:, None] & (col < num_cols)[None, :],
    )


def partial_sums(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Sums over shares of the vocabulary, then merged."""
    tile = TILES[hidden.element_size()]
    num_tiles = triton.cdiv(len(weight), tile["COLS"])
    tiles_a_share = triton.cdiv(num_tiles, MOST_SHARES)
    # No share is left without columns: its sums would have no top.
    num_shares = triton.cdiv(num_tiles, tiles_a_share)
    sums = torch.empty(4, num_shares, len(hidden), device=hidden.device)
    if len(hidden):
        inputs = hidden.contiguous(), weight.contiguous(), tokens.contiguous()
        grid = triton.cdiv(len(hidden), tile["ROWS"]), num_shares
        shape = len(hidden), len(weight), hidden.shape[1]
        share = tiles_a_share * tile["COLS"]
        _sums[grid](*inputs, sums, *shape, temperature, share, **tile)
    return merge(sums)


def gradients(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, terms: Tensor
) -> tuple[Tensor, Tensor]:
    """Products with slopes of the type of `weight`, summed in float32 over blocks."""
    block = block_of(len(hidden), len(weight), most_rows=MOST_ROWS, most_logits=MOST_LOGITS)
    slopes = partial(_slopes_of, temperature)
    inputs = hidden.contiguous(), weight.contiguous(), tokens, terms
    return summed_products(slopes, *inputs, block=block)


def _slopes_of(
    temperature: float, hidden: Tensor, head: Tensor, tokens: Tensor, terms: Tensor
) -> Tensor:
    tile: dict[str, Any] = TILES[hidden.element_size()]
    shape = len(hidden), len(head)
    slopes = hidden.new_empty(shape)
    grid = triton.cdiv(shape[0], tile["ROWS"]), triton.cdiv(shape[1], tile["COLS"])
    inputs = hidden, head, tokens.contiguous(), terms.contiguous()
    _slopes[grid](*inputs, slopes, *shape, hidden.shape[1], temperature, **tile)
    return slopes
