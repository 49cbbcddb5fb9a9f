"""Moves a model's weights between two layouts: plans transfers, in place or to other ranks."""

from hybridflow.reshard.planner import Plan, plan
from hybridflow.reshard.transition import Transition
from hybridflow.reshard.weight_sync import plan_sync, sync_weights

__all__ = ["Plan", "Transition", "plan", "plan_sync", "sync_weights"]
