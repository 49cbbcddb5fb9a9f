"""Attention of roots over their neighbours in machine code, for float32 on a CPU.

One pass a root: its neighbours' inputs are laid out in a buffer that stays in the first cache, time
encoded on the way, and nothing of the size of edges times columns is ever written to memory. The
backward pass lays them out again. Chunks of roots are fixed, whatever the number of threads, so that
sums repeat to the bit.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

__all__ = ["backward", "forward"]

_F32 = np.float32
_TURNS = 1 / (2 * np.pi)
_PI = _F32(np.pi)


def _compiled(*relaxed: str) -> Callable[[Any], Any]:
    """Machine code that lets other threads run, with some of the rules of rounding relaxed."""
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": set(relaxed) or False}

    def compiled(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # where no folder for the cache can be written
            return njit(**options)(function)

    return compiled


@_compiled("contract")
def _half_angles(span, frequency, phase, half):
    """Half the angle modulo a full turn, in units of pi: within [-1/2, 1/2]."""
    for j in range(half.size):
        turns = (span * frequency[j] + phase[j]) * _TURNS
        half[j] = _F32(turns - np.floor(turns + 0.5))


# Taylor's series on [-pi/2, pi/2] are exact to 6e-8. The full angle follows by doubling. One loop an
# output: with two the compiler gives up on vectors.
@_compiled("contract")
def _sine(x):
    square = x * x
    s = _F32(-1 / 39916800) * square + _F32(1 / 362880)
    s = s * square - _F32(1 / 5040)
    s = s * square + _F32(1 / 120)
    s = s * square - _F32(1 / 6)
    return (s * square + _F32(1)) * x


@_compiled("contract")
def _cosines(half, out):
    for j in range(half.size):
        s = _sine(half[j] * _PI)
        out[j] = _F32(1) - _F32(2) * s * s


@_compiled("contract")
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


@_compiled("contract", "reassoc")
def _dot(a, b):
    total = _F32(0)
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@_compiled("contract")
def _add(factor, x, out):
    for j in range(x.size):
        out[j] += factor * x[j]


@_compiled("contract")
def _add_time(span, sines, grad, of_frequency, of_phase):
    for j in range(sines.size):
        value = sines[j] * grad[j]
        of_frequency[j] -= value * span
        of_phase[j] -= value


@_compiled()
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


@_compiled("contract")
def forward(
    query,  # float32 [roots, heads, inputs]
    bias,  # float32 [roots, heads]
    rows,  # float32 [*, dim]
    neighbors,  # int64 [edges]
    edge_rows,  # float32 [*, edge_dim]
    edge_index,  # int64 [edges]
    dt,  # float64 [edges]
    frequency,  # float64 [time_dim]
    phase,
    starts,  # int64 [roots + 1]
    chunks,  # int64 [chunks + 1], of roots
    slope,
    begin,  # first chunk
    stop,
    out,  # float32 [roots, heads, inputs]
    score,  # float32 [edges, heads]
    weight,  # float32 [edges, heads]
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
        for head in range(query.shape[1]):
            top = _F32(-np.inf)
            for edge in range(first, end):
                value = _dot(query[root, head], inputs[edge - first]) + bias[root, head]
                score[edge, head] = value
                value = value if value > 0 else slope * value
                weight[edge, head] = value
                top = max(top, value)
            total = _F32(0)
            for edge in range(first, end):
                value = np.exp(weight[edge, head] - top)
                weight[edge, head] = value
                total += value
            mixed = out[root, head]
            mixed[:] = 0
            for edge in range(first, end):
                weight[edge, head] /= total
                _add(weight[edge, head], inputs[edge - first], mixed)


@_compiled("contract")
def backward(
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
    chunks,
    slope,
    begin,
    stop,
    score,
    weight,
    query_grad,  # float32 [roots, heads, inputs]
    bias_grad,  # float32 [roots, heads]
    row_grad,  # float32 [edges, dim], or [0, dim]: not asked for
    edge_grad,  # float32 [edges, edge_dim], or [0, edge_dim]
    time_grad,  # float64 [chunks, 2, time_dim], or [chunks, 2, 0]: of frequency and phase
):
    """Gradients of `forward`: of rows an edge, of time a chunk."""
    dim, edge_dim, time_dim = rows.shape[1], edge_rows.shape[1], frequency.size
    num_heads, num_inputs = query.shape[1], query.shape[2]
    wants_time = time_grad.shape[2] > 0
    begins = 0 if len(row_grad) else (dim if len(edge_grad) else dim + edge_dim)
    ends = num_inputs if wants_time else (dim + edge_dim if len(edge_grad) else dim)
    longest = 0
    for root in range(chunks[begin], chunks[stop]):
        longest = max(longest, starts[root + 1] - starts[root])
    inputs = np.empty((longest, num_inputs), np.float32)
    sines = np.empty((longest if wants_time else 0, time_dim), np.float32)
    half = np.empty(time_dim, np.float32)
    input_grad = np.empty(num_inputs, np.float32)
    score_grad = np.empty((longest, num_heads), np.float32)
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
                    value = _dot(grad[root, head], inputs[edge - first])
                    score_grad[edge - first, head] = value
                    mean += weight[edge, head] * value
                total = _F32(0)
                asked = query_grad[root, head]
                asked[:] = 0
                for edge in range(first, end):
                    value = weight[edge, head] * (score_grad[edge - first, head] - mean)
                    value = value if score[edge, head] > 0 else slope * value
                    score_grad[edge - first, head] = value
                    total += value
                    _add(value, inputs[edge - first], asked)
                bias_grad[root, head] = total
            if begins >= ends:
                continue
            for edge in range(first, end):
                wanted = input_grad[begins:ends]
                wanted[:] = 0
                for head in range(num_heads):
                    _add(weight[edge, head], grad[root, head, begins:ends], wanted)
                    _add(score_grad[edge - first, head], query[root, head, begins:ends], wanted)
                if len(row_grad):
                    row_grad[edge] = input_grad[:dim]
                if len(edge_grad):
                    edge_grad[edge] = input_grad[dim : dim + edge_dim]
                if wants_time:
                    _add_time(
                        dt[edge], sines[edge - first], input_grad[dim + edge_dim :],
                        time_grad[chunk, 0], time_grad[chunk, 1],
                    )  # fmt: skip
