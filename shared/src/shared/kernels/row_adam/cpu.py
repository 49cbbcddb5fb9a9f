"""Adam and row-wise AdaGrad on some rows in numba.

Rows lie far apart: those of a few iterations ahead are prefetched, which hides most of the latency.
"""

# ruff: noqa: ANN001, ANN202
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows
from shared.kernels.weight_matmul.vectors import prefetch

__all__ = ["adagrad_step", "count_steps", "step"]

# Prefetched bytes of a table: enough to cover the latency, few enough to stay in the cache.
_AHEAD_BYTES = 2048
_LINE_BYTES = 64
_AHEAD_COUNTS = 16


@compiled
def _fetch_row(table, begin, dim):
    for column in range(0, dim, _LINE_BYTES // table.itemsize):
        prefetch(table, begin + column)


@compiled
def _count_steps(steps, rows, counts):
    for i in range(rows.size):
        if i + _AHEAD_COUNTS < rows.size:
            prefetch(steps, rows[i + _AHEAD_COUNTS])
        counts[i] = steps[rows[i]] + 1
        steps[rows[i]] = counts[i]


@compiled
def _update(weight, first, second, grad, rate, fresh1, fresh2, eps, weight_decay):
    for j in range(grad.size):
        slope = grad[j] + weight_decay * weight[j]
        m = first[j] + (slope - first[j]) * fresh1
        v = second[j] + (slope * slope - second[j]) * fresh2
        first[j] = m
        second[j] = v
        weight[j] -= rate * (m / (np.sqrt(v) + eps))


@compiled
def _step(
    weight, first, second, rows, grads, rates, fresh1, fresh2, eps, weight_decay, start, stop
):
    dim = grads.shape[1]
    flat = weight.reshape(-1), first.reshape(-1), second.reshape(-1)
    ahead = max(1, _AHEAD_BYTES // (dim * grads.itemsize))
    for i in range(start, stop):
        if i + ahead < stop:
            begin = rows[i + ahead] * dim
            _fetch_row(flat[0], begin, dim)
            _fetch_row(flat[1], begin, dim)
            _fetch_row(flat[2], begin, dim)
        row = rows[i]
        _update(
            weight[row], first[row], second[row], grads[i], rates[i], fresh1, fresh2, eps,
            weight_decay,
        )  # fmt: skip


@compiled
def _adagrad_step(weight, totals, rows, grads, lr, eps, start, stop):
    dim = grads.shape[1]
    flat = weight.reshape(-1)
    ahead = max(1, _AHEAD_BYTES // (dim * grads.itemsize))
    for i in range(start, stop):
        if i + ahead < stop:
            _fetch_row(flat, rows[i + ahead] * dim, dim)
        row = rows[i]
        total = grads.dtype.type(0)
        for j in range(dim):
            total += grads[i, j] * grads[i, j]
        total = totals[row] + total / grads.dtype.type(dim)
        totals[row] = total
        rate = lr / (np.sqrt(total) + eps)
        for j in range(dim):
            weight[row, j] -= grads[i, j] * rate


def count_steps(steps: Tensor, rows: Tensor) -> Tensor:
    """Add 1 to steps[rows], once for each time a row is named; the counts [n] of rows named once."""
    counts = torch.empty(len(rows), dtype=torch.int32)
    _count_steps(steps.numpy(), rows.numpy(), counts.numpy())
    return counts


def step(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    rates: Tensor,
    hyper: tuple[float, float, float, float],
) -> None:
    """Update rows by Adam: rates are lr sqrt(1 - beta2^t) / (1 - beta1^t) of each row."""
    tables = [tensor.detach().numpy() for tensor in (weight, exp_avg, exp_avg_sq)]
    scalars = [tables[0].dtype.type(value) for value in hyper]
    run = partial(_step, *tables, rows.numpy(), grads.numpy(), rates.numpy(), *scalars)
    # Weight and moments are read and written.
    over_rows(run, len(rows), 7 * grads.nbytes)


def adagrad_step(
    weight: Tensor, totals: Tensor, rows: Tensor, grads: Tensor, lr: float, eps: float
) -> None:
    """Update rows by AdaGrad with one total a row."""
    tables = [tensor.detach().numpy() for tensor in (weight, totals)]
    scalars = [tables[0].dtype.type(value) for value in (lr, eps)]
    run = partial(_adagrad_step, *tables, rows.numpy(), grads.numpy(), *scalars)
    over_rows(run, len(rows), 3 * grads.nbytes)
