"""Lowers a model's operators to the precisions of a plan."""

import torch
from torch import distributed, nn

from qsync.planner.plan import Plan
from qsync.precisions import HIGHEST
from qsync.runtime.modules import list_operators, set_precision
from shared.errors import ConfigError

__all__ = ["apply", "find_plan"]

# A plan stays with its model when that is copied or pickled.
_PLAN = "_qsync_plan"


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Lowers a model's operators to this rank's precisions, in place.

    Parameters, their names, order and types stay. So do hooks, tied weights and frozen layers.
    Applying another plan replaces the former; an all-float32 plan restores the model.

    Args:
        model: float32 model, before `fully_shard`, `DistributedDataParallel` and `torch.compile`.
        plan: precisions by operator and rank.

    Returns:
        The model itself.

    Raises:
        ConfigError: the plan is of another model or number of ranks, or lowers an operator whose
            weight is not float32. The model is unchanged then.
    """
    plan.check_model(model)
    rank = 0
    if distributed.is_available() and distributed.is_initialized():
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        if len(plan.ranks) not in (1, num_ranks):
            raise ConfigError(
                f"plan: expected one of {num_ranks} ranks, got one made for {len(plan.ranks)}; plan "
                "anew for these ranks"
            )
    operators = list_operators(model)
    precisions = {name: plan.precision(name, rank) for name in operators}
    for name, precision in precisions.items():
        weight = getattr(operators[name], "weight", None)
        if precision != HIGHEST and weight is not None and weight.dtype != torch.float32:
            raise ConfigError(
                f"expected float32 weights, of which lower precisions are made, got {weight.dtype} in "
                f"{name!r}; convert the model by `.float()`"
            )
    for name, precision in precisions.items():
        set_precision(operators[name], precision)
    vars(model)[_PLAN] = plan
    return model


def find_plan(model: nn.Module) -> Plan | None:
    """Returns the plan that was applied to a model, None if there was none."""
    return vars(model).get(_PLAN)
