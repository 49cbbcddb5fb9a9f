"""Moving a model's weights between two layouts: what each rank receives, and doing it in place."""

from hybridflow.reshard.planner import Plan, plan
from hybridflow.reshard.sync import plan_sync, sync_weights
from hybridflow.reshard.transition import Transition

__all__ = ["Plan", "Transition", "plan", "plan_sync", "sync_weights"]
