"""Optimizers of learnable rows: only rows that a step has touched change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels import row_adam

__all__ = ["RowAdagrad", "RowAdam", "RowOptimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowAdam:
    """Adam on touched rows; each row counts its own steps.

    Attributes:
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: factor of a touched row that is added to its gradient.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Makes the state of a table [rows, dim]: two moments, and an int32 count of steps a row."""
        return {
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
            "steps": torch.zeros(len(weight), dtype=torch.int32),
        }

    def step(self, weight: Tensor, state: dict[str, Tensor], rows: Tensor, grads: Tensor) -> None:
        """Updates the touched rows, each named once, in place."""
        row_adam.step(
            weight, state["exp_avg"], state["exp_avg_sq"], state["steps"], rows, grads,
            lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RowAdagrad:
    """AdaGrad with one number a row, the sum of its gradients' mean squares: the least memory.

    Attributes:
        lr: learning rate.
        eps: added to the root of the sum.
    """

    lr: float = 0.01
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Makes the state of a table [rows, dim]: a number a row."""
        return {"totals": weight.new_zeros(len(weight))}

    def step(self, weight: Tensor, state: dict[str, Tensor], rows: Tensor, grads: Tensor) -> None:
        """Updates the touched rows, each named once, in place."""
        row_adam.adagrad_step(weight, state["totals"], rows, grads, lr=self.lr, eps=self.eps)


RowOptimizer = RowAdam | RowAdagrad


def _check_rate(lr: float) -> None:
    if not 0 <= lr < float("inf"):
        raise ConfigError(f"lr: expected a finite number from 0, got {lr}")
