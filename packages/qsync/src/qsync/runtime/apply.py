"""Lowers a model's operators to the precisions of a plan."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import distributed, nn

from qsync.precisions import HIGHEST, check_precision
from qsync.runtime.modules import list_operators, set_precision
from shared.errors import ConfigError

__all__ = ["apply"]


@runtime_checkable
class PrecisionPlan(Protocol):
    """What `apply` asks of a plan."""

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that the plan was not made for."""

    def precision(self, module: str, rank: int = 0) -> str:
        """Returns the precision of an operator on a rank."""
        ...


def apply(model: nn.Module, plan: PrecisionPlan) -> nn.Module:
    """Lowers a model's operators to this rank's precisions, in place.

    Parameters, their names, order and types stay. So do hooks, tied weights and frozen layers.
    Applying another plan replaces the former; an all-float32 plan restores the model.

    Args:
        model: float32 model, before `fully_shard`, `DistributedDataParallel` and `torch.compile`.
        plan: precisions by operator and rank.

    Returns:
        The model itself.

    Raises:
        ConfigError: the plan is of another model, names an unknown precision, or lowers an operator
            whose weight is not float32. The model is unchanged then.
    """
    plan.check_model(model)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    operators = list_operators(model)
    precisions = {name: plan.precision(name, rank) for name in operators}
    for name, precision in precisions.items():
        check_precision(precision)
        weight = getattr(operators[name], "weight", None)
        if precision != HIGHEST and weight is not None and weight.dtype != torch.float32:
            raise ConfigError(
                f"expected float32 weights, of which lower precisions are made, got {weight.dtype} in "
                f"{name!r}; convert the model by `.float()`"
            )
    for name, precision in precisions.items():
        set_precision(operators[name], precision)
    return model
