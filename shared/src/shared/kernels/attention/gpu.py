"""Attention of roots over their neighbours in Triton, for float32: all heads of a root at once.

Inputs of several edges are laid out as a tile, time encoded on the way, and a root's edges are gone
over once in either direction, after "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness" (arXiv 2205.14135): forward, the softmax is rescaled where a larger score comes;
backward, the mean of grad . input over a root's edges is grad . out. In between stay the scores of
edges and one logarithm a root and head.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from shared.kernels.attention.edges import Edges

__all__ = ["attend"]

# Products of heads, edges and columns that a program holds, edges among them, and elements a warp;
# guesses, no device was at hand.
_TILE = 2048
_MAX_EDGES = 16
_WARP = 512
# Of the backward pass: fixed, so that gradients of time have one order of summation.
PROGRAMS = 1024

_TURNS = tl.constexpr(1 / (2 * math.pi))
_PI = tl.constexpr(math.pi)


# Triton's own carries code for angles of any size. Of half the angle, within a quarter of a turn, a
# Taylor series of the sine is exact to 6e-8; the cosine of the full angle follows by doubling.
@triton.jit
def _cosine(turn):
    """The cosine of at most half a turn."""
    x = turn * _PI
    square = x * x
    sine = -1 / 39916800 * square + 1 / 362880
    sine = sine * square - 1 / 5040
    sine = sine * square + 1 / 120
    sine = sine * square - 1 / 6
    sine = (sine * square + 1) * x
    return 1 - 2 * sine * sine


@triton.jit
def _sine(turn):
    """The sine of at most half a turn: the cosine a quarter earlier."""
    earlier = turn - 0.25
    return _cosine(tl.where(earlier < -0.5, earlier + 1, earlier))


@triton.jit
def _parts(dim, edge_dim, time_dim, COLS: tl.constexpr):
    """Positions within the row, the edge's features and time, and the columns that have one."""
    col = tl.arange(0, COLS)
    feature = col - dim
    time = feature - edge_dim
    is_feature = (feature >= 0) & (feature < edge_dim)
    return col, feature, time, col < dim, is_feature, (time >= 0) & (time < time_dim)


@triton.jit
def _lay_out(
    edge,  # [EDGES]
    live,
    rows,
    neighbors,
    edge_rows,
    edge_index,
    dt,
    frequency,
    phase,
    dim,
    edge_dim,
    time_dim,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
    HAS_TIME: tl.constexpr,
):
    """Inputs [EDGES, COLS] of edges, and angles of time, in turns, at most half of one."""
    col, feature, time, is_row, is_feature, is_time = _parts(dim, edge_dim, time_dim, COLS)
    neighbor = tl.load(neighbors + edge, mask=live, other=0)[:, None]
    inputs = tl.load(
        rows + neighbor * dim + col[None, :], mask=live[:, None] & is_row[None, :], other=0.0
    )
    index = tl.load(edge_index + edge, mask=live, other=0)[:, None]
    inputs += tl.load(
        edge_rows + index * edge_dim + feature[None, :],
        mask=live[:, None] & is_feature[None, :],
        other=0.0,
    ).to(tl.float32)
    turn = tl.zeros([EDGES, COLS], tl.float32)
    if HAS_TIME:
        # Whole turns leave in float64: in float32 a span of years has no angle.
        span = tl.load(dt + edge, mask=live, other=0.0)[:, None]
        pace = tl.load(frequency + time, mask=is_time, other=0.0)[None, :]
        turns = span * pace + tl.load(phase + time, mask=is_time, other=0.0)[None, :]
        turns *= _TURNS
        turn = (turns - tl.floor(turns + 0.5)).to(tl.float32)
        inputs = tl.where(live[:, None] & is_time[None, :], _cosine(turn), inputs)
    return inputs, turn


@triton.jit
def _forward(
    query,  # float32 [roots, heads, inputs]
    bias,  # float32 [roots, heads]
    rows,  # float32 [*, dim]
    neighbors,  # int64 [edges]
    edge_rows,  # [*, edge_dim]
    edge_index,  # int64 [edges]
    dt,  # float64 [edges]
    frequency,  # float64 [time_dim]
    phase,
    starts,  # int64 [roots + 1]
    out,  # float32 [roots, heads, inputs]
    score,  # float32 [edges, heads]
    level,  # float32 [roots, heads]: logarithm of the sum of exponentials
    slope,
    num_heads,
    dim,
    edge_dim,
    time_dim,
    HEADS: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
    HAS_TIME: tl.constexpr,
):
    root = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, HEADS), tl.arange(0, COLS)
    num_inputs = dim + edge_dim + time_dim
    is_head = head < num_heads
    of_head = root * num_heads + head
    inside = is_head[:, None] & (col < num_inputs)[None, :]
    place = of_head[:, None] * num_inputs + col[None, :]
    asked = tl.load(query + place, mask=inside, other=0.0)
    offset = tl.load(bias + of_head, mask=is_head, other=0.0)
    first = tl.load(starts + root)
    count = (tl.load(starts + root + 1) - first).to(tl.int32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, COLS], tl.float32)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        live = nth < count
        edge = first + nth
        inputs, _ = _lay_out(
            edge, live, rows, neighbors, edge_rows, edge_index, dt, frequency, phase,
            dim, edge_dim, time_dim, EDGES, COLS, HAS_TIME,
        )  # fmt: skip
        value = tl.sum(asked[:, None, :] * inputs[None, :, :], 2) + offset[:, None]
        tl.store(
            score + edge[None, :] * num_heads + head[:, None],
            value,
            mask=is_head[:, None] & live[None, :],
        )
        value = tl.where(value > 0, value, slope * value)
        value = tl.where(live[None, :], value, float("-inf"))
        higher = tl.maximum(top, tl.max(value, 1))
        weight = tl.exp(value - higher[:, None])
        shrunk = tl.exp(top - higher)
        total = total * shrunk + tl.sum(weight, 1)
        mixed = mixed * shrunk[:, None] + tl.sum(weight[:, :, None] * inputs[None, :, :], 1)
        top = higher
    # A root without edges has no sum to divide by.
    total = tl.where(count > 0, total, 1.0)
    tl.store(level + of_head, top + tl.log(total), mask=is_head)
    tl.store(out + place, mixed / total[:, None], mask=inside)


@triton.jit
def _backward(
    grad,  # float32 [roots, heads, inputs]
    query,
    rows,
    neighbors,
    edge_rows,
    edge_index,
    dt,
    frequency,
    phase,
    starts,
    out,
    score,
    level,
    query_grad,  # float32 [roots, heads, inputs]
    bias_grad,  # float32 [roots, heads]
    row_grad,  # float32 [*, dim], added to
    edge_grad,  # float32 [*, edge_dim], added to
    time_grad,  # float64 [programs, 2, time_dim]: of frequency and phase
    slope,
    num_roots,
    num_heads,
    dim,
    edge_dim,
    time_dim,
    HEADS: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
    HAS_TIME: tl.constexpr,
    OF_ROWS: tl.constexpr,
    OF_EDGES: tl.constexpr,
    OF_TIME: tl.constexpr,
):
    col, feature, time, is_row, is_feature, is_time = _parts(dim, edge_dim, time_dim, COLS)
    head = tl.arange(0, HEADS)
    num_inputs = dim + edge_dim + time_dim
    is_head = head < num_heads
    inside = is_head[:, None] & (col < num_inputs)[None, :]
    of_frequency = tl.zeros([COLS], tl.float64)
    of_phase = tl.zeros([COLS], tl.float64)
    root = tl.program_id(0).to(tl.int64)
    while root < num_roots:
        of_head = root * num_heads + head
        place = of_head[:, None] * num_inputs + col[None, :]
        asked = tl.load(query + place, mask=inside, other=0.0)
        given = tl.load(grad + place, mask=inside, other=0.0)
        mean = tl.sum(given * tl.load(out + place, mask=inside, other=0.0), 1, keep_dims=True)
        of_root = tl.load(level + of_head, mask=is_head, other=0.0)
        first = tl.load(starts + root)
        count = (tl.load(starts + root + 1) - first).to(tl.int32)
        of_query = tl.zeros([HEADS, COLS], tl.float32)
        of_bias = tl.zeros([HEADS], tl.float32)
        for start in range(0, count, EDGES):
            nth = start + tl.arange(0, EDGES)
            live = nth < count
            edge = first + nth
            inputs, turn = _lay_out(
                edge, live, rows, neighbors, edge_rows, edge_index, dt, frequency, phase,
                dim, edge_dim, time_dim, EDGES, COLS, HAS_TIME,
            )  # fmt: skip
            value = tl.load(
                score + edge[None, :] * num_heads + head[:, None],
                mask=is_head[:, None] & live[None, :],
                other=0.0,
            )
            weight = tl.exp(tl.where(value > 0, value, slope * value) - of_root[:, None])
            weight = tl.where(live[None, :], weight, 0.0)
            of_score = weight * (tl.sum(given[:, None, :] * inputs[None, :, :], 2) - mean)
            of_score = tl.where(value > 0, of_score, slope * of_score)
            of_bias += tl.sum(of_score, 1)
            of_query += tl.sum(of_score[:, :, None] * inputs[None, :, :], 1)
            of_inputs = tl.sum(
                weight[:, :, None] * given[:, None, :] + of_score[:, :, None] * asked[:, None, :], 0
            )
            if OF_ROWS:
                neighbor = tl.load(neighbors + edge, mask=live, other=0)[:, None]
                tl.atomic_add(
                    row_grad + neighbor * dim + col[None, :],
                    of_inputs,
                    mask=live[:, None] & is_row[None, :],
                    sem="relaxed",
                )
            if OF_EDGES:
                index = tl.load(edge_index + edge, mask=live, other=0)[:, None]
                tl.atomic_add(
                    edge_grad + index * edge_dim + feature[None, :],
                    of_inputs,
                    mask=live[:, None] & is_feature[None, :],
                    sem="relaxed",
                )
            if OF_TIME:
                span = tl.load(dt + edge, mask=live, other=0.0)[:, None]
                of_angle = (_sine(turn) * of_inputs).to(tl.float64)
                of_frequency -= tl.sum(of_angle * span, 0)
                of_phase -= tl.sum(of_angle, 0)
        tl.store(query_grad + place, of_query, mask=inside)
        tl.store(bias_grad + of_head, of_bias, mask=is_head)
        root += tl.num_programs(0)
    if OF_TIME:
        place = time_grad + tl.program_id(0) * 2 * time_dim + time
        tl.store(place, of_frequency, mask=is_time)
        tl.store(place + time_dim, of_phase, mask=is_time)


def _sizes(query: Tensor, time_dim: int) -> dict[str, Any]:
    heads, cols = (triton.next_power_of_2(size) for size in query.shape[1:])
    edges = max(1, min(_MAX_EDGES, _TILE // (heads * cols)))
    return {
        "HEADS": heads,
        "EDGES": edges,
        "COLS": cols,
        "HAS_TIME": time_dim > 0,
        "num_warps": max(1, min(8, heads * edges * cols // _WARP)),
    }


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        bias: Tensor,
        rows: Tensor,
        edge_rows: Tensor,
        frequency: Tensor,
        phase: Tensor,
        edges: Edges,
        slope: float,
    ) -> Tensor:
        asked = (query, bias, rows, edges.neighbors, edge_rows, edges.edge_index, edges.dt.double())
        saved = [
            tensor.detach().contiguous()
            for tensor in (*asked, frequency.double(), phase.double(), edges.starts)
        ]
        num_roots, num_heads, _ = query.shape
        widths = rows.shape[1], edge_rows.shape[1], len(frequency)
        out, level = torch.empty_like(saved[0]), torch.empty_like(saved[1])
        score = query.new_empty(len(edges.neighbors), num_heads)
        if out.numel():
            arguments = *saved, out, score, level, slope, num_heads, *widths
            _forward[(num_roots,)](*arguments, **_sizes(query, len(frequency)))
        ctx.save_for_backward(*saved, out, score, level)
        ctx.slope = slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, bias, *saved = ctx.saved_tensors
        rows, edge_rows, frequency = saved[0], saved[2], saved[5]
        num_roots, num_heads, _ = query.shape
        widths = rows.shape[1], edge_rows.shape[1], len(frequency)
        wants_rows, wants_edges, *wants_time = ctx.needs_input_grad[2:6]
        query_grad, bias_grad = torch.zeros_like(query), torch.zeros_like(bias)
        of_rows = torch.zeros_like(rows) if wants_rows else None
        of_edges = torch.zeros_like(edge_rows, dtype=torch.float32) if wants_edges else None
        num_programs = min(num_roots, PROGRAMS)
        time_grad = frequency.new_zeros(num_programs, 2, len(frequency) if any(wants_time) else 0)
        if query.numel():
            arguments = (
                grads[0].contiguous(),
                query,
                *saved,
                query_grad,
                bias_grad,
                query_grad if of_rows is None else of_rows,
                query_grad if of_edges is None else of_edges,
                time_grad,
                ctx.slope,
                num_roots,
                num_heads,
                *widths,
            )
            is_asked = {"OF_ROWS": wants_rows, "OF_EDGES": wants_edges, "OF_TIME": any(wants_time)}
            _backward[(num_programs,)](*arguments, **_sizes(query, len(frequency)), **is_asked)
        of_frequency, of_phase = time_grad.sum(0).float() if any(wants_time) else (None, None)
        return query_grad, bias_grad, of_rows, of_edges, of_frequency, of_phase, None, None


def attend(
    query: Tensor,
    bias: Tensor,
    rows: Tensor,
    edges: Edges,
    frequency: Tensor,
    phase: Tensor,
    slope: float,
) -> Tensor:
    """Weighted means, keeping one number an edge and head."""
    return _Attend.apply(query, bias, rows, edges.edge_rows, frequency, phase, edges, slope)
