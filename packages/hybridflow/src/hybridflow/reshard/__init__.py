"""Moving a model's weights between two layouts: what each rank receives, and doing it in place."""

from hybridflow.reshard.planner import Plan, plan
from hybridflow.reshard.transition import Transition
from hybridflow.roles.weight_sync import plan_sync, sync_weights

__all__ = ["Plan", "Transition", "plan", "plan_sync", "sync_weights"]
