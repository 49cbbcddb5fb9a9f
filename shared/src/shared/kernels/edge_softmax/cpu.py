"""Softmax over the edges of each row in numba, around torch's exponential, which computes in vectors."""

# ruff: noqa: ANN001, ANN202
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import num_tasks, over_ranges

__all__ = ["edge_softmax", "edge_softmax_backward", "softmax_state", "softmax_state_backward"]

# The compiler chooses the order within a dot product, the same one every time.
_reassociated = partial(compiled, relaxed=frozenset({"contract", "reassoc"}))


@compiled
def _shift(indptr, logits, maximum, shifted, start, stop):
    """Fill `maximum`, and `shifted` with logits less their row's maximum."""
    zero = logits.dtype.type(0)
    for row in range(start, stop):
        for head in range(logits.shape[1]):
            maximum[row, head] = -np.inf
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(logits.shape[1]):
                logit = logits[edge, head]
                # A NaN enters by the second condition, and nothing is greater than it.
                if logit > maximum[row, head] or np.isnan(logit):
                    maximum[row, head] = logit
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(logits.shape[1]):
                top = maximum[row, head]
                # A row of -inf alone: -inf less 0, and not less itself.
                shifted[edge, head] = logits[edge, head] - (zero if top == -np.inf else top)


@compiled
def _normalize(indptr, powers, start, stop):
    """Divide each power by its row's sum."""
    total = np.empty(powers.shape[1], powers.dtype)
    for row in range(start, stop):
        total[:] = 0
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(total.size):
                total[head] += powers[edge, head]
        for head in range(total.size):
            if total[head] == 0:
                total[head] = 1
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(total.size):
                powers[edge, head] /= total[head]


@compiled
def _softmax_grad(indptr, weights, grad, out, start, stop):
    mean = np.empty(weights.shape[1], weights.dtype)
    for row in range(start, stop):
        mean[:] = 0
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(mean.size):
                mean[head] += weights[edge, head] * grad[edge, head]
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(mean.size):
                out[edge, head] = weights[edge, head] * (grad[edge, head] - mean[head])


@compiled
def _add(factor, x, out):
    for j in range(x.size):
        out[j] += factor * x[j]


@compiled
def _scale(factor, x, out):
    for j in range(x.size):
        out[j] = factor * x[j]


@_reassociated
def _dot(a, b):
    total = a.dtype.type(0)
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@compiled
def _weigh(indptr, powers, values, total, weighted, start, stop):
    """Fill the sums of powers, and of powers times values."""
    for row in range(start, stop):
        total[row] = 0
        weighted[row] = 0
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(powers.shape[1]):
                total[row, head] += powers[edge, head]
                _add(powers[edge, head], values[edge, head], weighted[row, head])


@compiled
def _state_grad(
    indptr, powers, values, grad_total, grad_weighted, grad_logits, grad_values, start, stop
):
    for row in range(start, stop):
        for edge in range(indptr[row], indptr[row + 1]):
            for head in range(powers.shape[1]):
                power = powers[edge, head]
                grad = grad_weighted[row, head]
                product = _dot(grad, values[edge, head])
                grad_logits[edge, head] = power * (grad_total[row, head] + product)
                _scale(power, grad, grad_values[edge, head])


def _run(kernel: Callable[..., Any], indptr: Tensor, *tensors: Tensor) -> None:
    """Run a kernel over all rows, which threads share by their edges: degrees are skewed."""
    ptr = indptr.numpy()
    run = partial(kernel, ptr, *(tensor.numpy() for tensor in tensors))
    num_edges = int(ptr[-1])
    tasks = num_tasks(sum(tensor.nbytes for tensor in tensors))
    cuts = np.searchsorted(ptr, [num_edges * i // tasks for i in range(1, tasks)])
    over_ranges(run, [0, *(int(cut) for cut in cuts), len(ptr) - 1])


def _powers(indptr: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    maximum = logits.new_empty(len(indptr) - 1, logits.shape[1])
    shifted = torch.empty_like(logits)
    _run(_shift, indptr, logits, maximum, shifted)
    return maximum, shifted.exp_()


def edge_softmax(indptr: Tensor, logits: Tensor) -> Tensor:
    """The weight of each edge and head [edges, heads]."""
    _, powers = _powers(indptr, logits)
    _run(_normalize, indptr, powers)
    return powers


def edge_softmax_backward(indptr: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits for that of the weights."""
    out = torch.empty_like(weights)
    _run(_softmax_grad, indptr, weights, grad, out)
    return out


def softmax_state(
    indptr: Tensor, logits: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logits, each edge's e^(logit - largest), their sums, and the sums of them times values."""
    maximum, powers = _powers(indptr, logits)
    total = torch.empty_like(maximum)
    weighted = values.new_empty(len(total), *values.shape[1:])
    _run(_weigh, indptr, powers, values, total, weighted)
    return maximum, powers, total, weighted


def softmax_state_backward(
    indptr: Tensor, powers: Tensor, values: Tensor, grad_total: Tensor, grad_weighted: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and values for those of the sums."""
    grad_logits, grad_values = torch.empty_like(powers), torch.empty_like(values)
    _run(_state_grad, indptr, powers, values, grad_total, grad_weighted, grad_logits, grad_values)
    return grad_logits, grad_values
