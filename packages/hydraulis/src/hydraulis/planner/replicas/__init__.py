"""Unequal replicas side by side: which run in a step, on which ranks, and where parameters lie."""

from hydraulis.planner.replicas.buckets import ParameterPiece, cut_buckets
from hydraulis.planner.replicas.layout import MovedBytes, ParameterPlacement, ReplicaLayout
from hydraulis.planner.replicas.plan import ReplicaPlan, plan_replicas
from hydraulis.planner.replicas.strategy import rank_grids, read_strategy, stage_layers

__all__ = [
    "MovedBytes",
    "ParameterPiece",
    "ParameterPlacement",
    "ReplicaLayout",
    "ReplicaPlan",
    "cut_buckets",
    "plan_replicas",
    "rank_grids",
    "read_strategy",
    "stage_layers",
]
