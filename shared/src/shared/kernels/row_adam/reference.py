"""Adam and row-wise AdaGrad on some rows in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["adagrad_step", "count_steps", "step"]


def count_steps(steps: Tensor, rows: Tensor) -> Tensor:
    """Add 1 to steps[rows], once for each time a row is named; the counts [n] of rows named once."""
    counts = steps[rows] + 1
    steps.index_add_(0, rows, torch.ones_like(counts))
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
    """Update rows by Adam: rates are lr sqrt(1 - beta2^t) / (1 - beta1^t) of each row.

    `hyper` is 1 - beta1, 1 - beta2, eps and weight decay.
    """
    fresh1, fresh2, eps, weight_decay = hyper
    before = weight[rows]
    grads = grads + weight_decay * before
    first, second = exp_avg[rows], exp_avg_sq[rows]
    first = first + (grads - first) * fresh1
    second = second + (grads * grads - second) * fresh2
    exp_avg[rows], exp_avg_sq[rows] = first, second
    weight[rows] = before - rates[:, None] * (first / (second.sqrt() + eps))


def adagrad_step(
    weight: Tensor, totals: Tensor, rows: Tensor, grads: Tensor, lr: float, eps: float
) -> None:
    """Update rows by AdaGrad with one total a row."""
    total = totals[rows] + grads.square().mean(1)
    totals[rows] = total
    weight[rows] -= grads * (lr / (total.sqrt() + eps))[:, None]
