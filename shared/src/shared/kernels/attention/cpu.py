"""Attention of roots over their neighbours in machine code, for float32.

One pass a root: its neighbours' inputs are laid out in a buffer that stays in the first cache, time
encoded on the way, and nothing of the size of edges times columns is ever written to memory. The
backward pass lays them out again. Chunks of roots are fixed, whatever the number of threads, so that
sums repeat to the bit.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows

if TYPE_CHECKING:
    from shared.kernels.attention.edges import Edges

__all__ = ["attend"]

# Fixed, so that sums over roots have one order for any number of threads.
_NUM_CHUNKS = 16

_F32 = np.float32
_TURNS = 1 / (2 * np.pi)
_PI = _F32(np.pi)


_contracted = partial(compiled, relaxed=frozenset({"contract"}))
_reassociated = partial(compiled, relaxed=frozenset({"contract", "reassoc"}))


@_contracted
def _half_angles(span, frequency, phase, half):
    """Half the angle modulo a full turn, in units of pi: within [-1/2, 1/2]; of numbers in turns."""
    for j in range(half.size):
        turns = span * frequency[j] + phase[j]
        half[j] = _F32(turns - np.floor(turns + 0.5))


# Taylor's series on [-pi/2, pi/2] are exact to 6e-8. The full angle follows by doubling. One loop an
# output: with two the compiler gives up on vectors.
@_contracted
def _sine(x):
    square = x * x
    s = _F32(-1 / 39916800) * square + _F32(1 / 362880)
    s = s * square - _F32(1 / 5040)
    s = s * square + _F32(1 / 120)
    s = s * square - _F32(1 / 6)
    return (s * square + _F32(1)) * x


@_contracted
def _cosines(half, out):
    for j in range(half.size):
        s = _sine(half[j] * _PI)
        out[j] = _F32(1) - _F32(2) * s * s


@_contracted
def _sines(half, out):
    for j in range(half.size):
        x = half[j] * _PI
        square = x * x
        c = _F32(1 / 479001600) * square - _F32(1 / 3628800)
        c = c * square + _F32(1 / 40320)
        c = c * square - _F32(1 / 720)
        c = c * square + _F32(1 / 24)
        c = c * square - _F32(1 / 2)
        c = c * square + _F32(1)
        out[j] = _F32(2) * _sine(x) * c


@_reassociated
def _dot(a, b):
    total = _F32(0)
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@_contracted
def _add(factor, x, out):
    for j in range(x.size):
        out[j] += factor * x[j]


@_contracted
def _add_two(factor, x, other_factor, y, out):
    for j in range(x.size):
        out[j] += factor * x[j] + other_factor * y[j]


@compiled
def _mix(factors, rows, out):
    """out = sum of factors[i] * rows[i]; two a pass, since a pass is bound by reading out."""
    out[:] = 0
    count = factors.size
    for i in range(0, count - 1, 2):
        _add_two(factors[i], rows[i], factors[i + 1], rows[i + 1], out)
    if count % 2:
        _add(factors[count - 1], rows[count - 1], out)


@compiled
def _input_grad(edge, root, weight, grad, score_grad, query, column, out):
    """Adds what an edge's input gets, through the sum and through the score, columns from `column` on."""
    end = column + out.size
    for head in range(len(weight)):
        _add_two(
            weight[head, edge], grad[head, root, column:end],
            score_grad[head, edge], query[head, root, column:end], out,
        )  # fmt: skip


@_contracted
def _add_time(span, sines, grad, of_frequency, of_phase):
    for j in range(sines.size):
        value = sines[j] * grad[j]
        of_frequency[j] -= value * span
        of_phase[j] -= value


@compiled
def _lay_out(
    first, end, rows, neighbors, edge_rows, edge_index, dt, frequency, phase, half, inputs, sines
):
    """Inputs of the edges [first, end): the neighbour's row, the edge's, its encoded time."""
    dim, edge_dim = rows.shape[1], edge_rows.shape[1]
    for edge in range(first, end):
        row = inputs[edge - first]
        neighbor, feature = neighbors[edge], edge_index[edge]
        for j in range(dim):
            row[j] = rows[neighbor, j]
        for j in range(edge_dim):
            row[dim + j] = edge_rows[feature, j]
        if half.size:
            _half_angles(dt[edge], frequency, phase, half)
            _cosines(half, row[dim + edge_dim :])
            if len(sines):
                _sines(half, sines[edge - first])


@_contracted
def _forward(
    query,  # float32 [heads, roots, inputs]
    bias,  # float32 [heads, roots]
    rows,  # float32 [*, dim]
    neighbors,  # int64 [edges]
    edge_rows,  # float32 [*, edge_dim]
    edge_index,  # int64 [edges]
    dt,  # float64 [edges]
    frequency,  # float64 [time_dim], in turns
    phase,  # in turns
    starts,  # int64 [roots + 1]
    chunks,  # int64 [chunks + 1], of roots
    slope,
    begin,  # first chunk
    stop,
    out,  # float32 [heads, roots, inputs]
    score,  # float32 [heads, edges]
    weight,  # float32 [heads, edges]
):
    """Mean of each root's inputs, weighted by softmax(leaky(query x + bias)); the chunks' roots."""
    longest = 0
    for root in range(chunks[begin], chunks[stop]):
        longest = max(longest, starts[root + 1] - starts[root])
    inputs = np.empty((longest, query.shape[2]), np.float32)
    half = np.empty(frequency.size, np.float32)
    sines = np.empty((0, 0), np.float32)
    for root in range(chunks[begin], chunks[stop]):
        first, end = starts[root], starts[root + 1]
        _lay_out(
            first, end, rows, neighbors, edge_rows, edge_index, dt, frequency, phase, half, inputs,
            sines,
        )  # fmt: skip
        for head in range(len(query)):
            top = _F32(-np.inf)
            for edge in range(first, end):
                value = _dot(query[head, root], inputs[edge - first]) + bias[head, root]
                score[head, edge] = value
                value = value if value > 0 else slope * value
                weight[head, edge] = value
                top = max(top, value)
            total = _F32(0)
            for edge in range(first, end):
                value = np.exp(weight[head, edge] - top)
                weight[head, edge] = value
                total += value
            for edge in range(first, end):
                weight[head, edge] /= total
            _mix(weight[head, first:end], inputs, out[head, root])


@_contracted
def _backward(
    grad,  # float32 [heads, roots, inputs]
    query,
    rows,
    neighbors,
    edge_rows,
    edge_index,
    dt,
    frequency,
    phase,
    starts,
    chunks,
    slope,
    begin,
    stop,
    score,
    weight,
    query_grad,  # float32 [heads, roots, inputs]
    bias_grad,  # float32 [heads, roots]
    score_grad,  # float32 [heads, edges]
    time_grad,  # float64 [chunks, 2, time_dim], or [chunks, 2, 0]: of frequency and phase
):
    """Gradients of `_forward`, but for what edges read: of queries, of scores, and of time a chunk."""
    dim, edge_dim, time_dim = rows.shape[1], edge_rows.shape[1], frequency.size
    num_heads, num_inputs = len(query), query.shape[2]
    wants_time = time_grad.shape[2] > 0
    longest = 0
    for root in range(chunks[begin], chunks[stop]):
        longest = max(longest, starts[root + 1] - starts[root])
    inputs = np.empty((longest, num_inputs), np.float32)
    sines = np.empty((longest if wants_time else 0, time_dim), np.float32)
    half = np.empty(time_dim, np.float32)
    of_time = np.empty(time_dim, np.float32)
    for chunk in range(begin, stop):
        for root in range(chunks[chunk], chunks[chunk + 1]):
            first, end = starts[root], starts[root + 1]
            _lay_out(
                first, end, rows, neighbors, edge_rows, edge_index, dt, frequency, phase, half,
                inputs, sines,
            )  # fmt: skip
            for head in range(num_heads):
                mean = _F32(0)
                for edge in range(first, end):
                    value = _dot(grad[head, root], inputs[edge - first])
                    score_grad[head, edge] = value
                    mean += weight[head, edge] * value
                total = _F32(0)
                for edge in range(first, end):
                    value = weight[head, edge] * (score_grad[head, edge] - mean)
                    value = value if score[head, edge] > 0 else slope * value
                    score_grad[head, edge] = value
                    total += value
                _mix(score_grad[head, first:end], inputs, query_grad[head, root])
                bias_grad[head, root] = total
            if wants_time:
                for edge in range(first, end):
                    of_time[:] = 0
                    _input_grad(
                        edge, root, weight, grad, score_grad, query, dim + edge_dim, of_time
                    )
                    _add_time(
                        dt[edge], sines[edge - first], of_time, time_grad[chunk, 0],
                        time_grad[chunk, 1],
                    )  # fmt: skip


@compiled
def _targets_grad(
    starts,
    targets,  # int64 [edges], the rows that edges read
    weight,
    grad,
    score_grad,
    query,
    column,  # of the inputs, where those of the rows begin
    begin,  # first column
    stop,
    out,  # float32 [rows, columns], zeros
):
    """Gradients of rows that edges read, each summed in the order of the edges."""
    for root in range(starts.size - 1):
        for edge in range(starts[root], starts[root + 1]):
            total = out[targets[edge], begin:stop]
            _input_grad(edge, root, weight, grad, score_grad, query, column + begin, total)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [heads, roots, inputs]
        bias: Tensor,  # [heads, roots]
        rows: Tensor,
        edge_rows: Tensor,
        frequency: Tensor,
        phase: Tensor,
        edges: Edges,
        slope: float,
    ) -> Tensor:
        num_heads, num_roots, num_inputs = query.shape
        num_edges = len(edges.neighbors)
        asked = (query, bias, rows, edges.neighbors, edge_rows, edges.edge_index, edges.dt.double())
        chunks = torch.arange(_NUM_CHUNKS + 1) * num_roots // _NUM_CHUNKS
        turns = frequency.double() * _TURNS, phase.double() * _TURNS
        saved = [tensor.detach().contiguous() for tensor in (*asked, *turns, edges.starts, chunks)]
        out = torch.empty_like(saved[0])
        score, weight = query.new_empty(2, num_heads, num_edges).unbind()
        arrays = [tensor.numpy() for tensor in saved]
        results = [tensor.numpy() for tensor in (out, score, weight)]

        def run(begin: int, stop: int) -> None:
            _forward(*arrays, np.float32(slope), begin, stop, *results)

        over_rows(run, _NUM_CHUNKS, 4 * num_edges * num_inputs)
        ctx.save_for_backward(*saved, score, weight)
        ctx.slope = slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, score, weight = ctx.saved_tensors
        query, bias, rows, neighbors, edge_rows, edge_index, dt, frequency = saved[:8]
        wants_rows, wants_edges, *wants_time = ctx.needs_input_grad[2:6]
        query_grad, bias_grad = torch.empty_like(query), torch.empty_like(bias)
        score_grad = torch.empty_like(score)
        time_grad = dt.new_zeros(_NUM_CHUNKS, 2, len(frequency) if any(wants_time) else 0)
        grad = grads[0].contiguous()
        arrays = [tensor.numpy() for tensor in (grad, query, *saved[2:])]
        results = [
            tensor.numpy()
            for tensor in (score, weight, query_grad, bias_grad, score_grad, time_grad)
        ]

        def run(begin: int, stop: int) -> None:
            _backward(*arrays, np.float32(ctx.slope), begin, stop, *results)

        over_rows(run, _NUM_CHUNKS, 4 * len(neighbors) * query.shape[2])
        read = [tensor.numpy() for tensor in (weight, grad, score_grad, query)]
        starts = saved[9].numpy()

        def of_targets(targets: Tensor, like: Tensor, column: int) -> Tensor:
            out = torch.zeros_like(like)

            def run(begin: int, stop: int) -> None:
                _targets_grad(starts, targets.numpy(), *read, column, begin, stop, out.numpy())

            # Each thread has its columns, so that sums have one order.
            over_rows(run, like.shape[1], 4 * len(targets) * len(query) * like.shape[1])
            return out

        dim = rows.shape[1]
        of_rows = of_targets(neighbors, rows, 0) if wants_rows else None
        of_edges = of_targets(edge_index, edge_rows, dim) if wants_edges else None
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
    """Weighted means, keeping two numbers an edge and head.

    Works head by head: batched products have such results, and want such gradients.
    """
    query, bias = query.transpose(0, 1), bias.T
    out = _Attend.apply(query, bias, rows, edges.edge_rows, frequency, phase, edges, slope)
    return out.transpose(0, 1)
