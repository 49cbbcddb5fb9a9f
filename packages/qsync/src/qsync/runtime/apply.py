"""Lowers a model's operators to the precisions of a plan."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from qsync.precisions import HIGHEST
from qsync.runtime.modules import list_operators, set_precision
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["PrecisionPlan", "apply", "check_weights", "find_plan"]

# A plan stays with its model when that is copied or pickled.
_PLAN = "_qsync_plan"


@runtime_checkable
class PrecisionPlan(Protocol):
    """What `apply` asks of a plan."""

    @property
    def ranks(self) -> Sequence[Any]:
        """One entry a rank, or one for all ranks."""
        ...

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that the plan was not made for."""

    def precision(self, name: str, rank: int = 0) -> str:
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
        ConfigError: the plan is of another model or number of ranks (1 where none were joined yet),
            or lowers an operator whose weight is not float32. The model is unchanged then.
    """
    plan.check_model(model)
    group = Group.world() if Group.exists() else None
    rank, num_ranks = (group.rank, group.world_size) if group else (0, 1)
    if len(plan.ranks) not in (1, num_ranks):
        raise ConfigError(
            f"plan: expected one of 1 or {num_ranks} ranks, got one made for {len(plan.ranks)}; join "
            "the ranks before `apply`, or plan anew for these"
        )
    operators = list_operators(model)
    precisions = {name: plan.precision(name, rank) for name in operators}
    check_weights({name: operators[name] for name, each in precisions.items() if each != HIGHEST})
    for name, precision in precisions.items():
        set_precision(operators[name], precision)
    vars(model)[_PLAN] = plan
    return model


def check_weights(operators: Mapping[str, nn.Module]) -> None:
    """Refuses operators that cannot be lowered, since their weights are not float32.

    Raises:
        ConfigError: with the operator's name.
    """
    for name, module in operators.items():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dtype != torch.float32:
            raise ConfigError(
                f"expected float32 weights, which lower precisions are rounded from, got {weight.dtype} in "
                f"{name!r}; convert the model with `.float()`"
            )


def find_plan(model: nn.Module) -> Any:
    """Returns the plan that was applied to a model, compiled or not; None if there was none."""
    return getattr(model, _PLAN, None)
