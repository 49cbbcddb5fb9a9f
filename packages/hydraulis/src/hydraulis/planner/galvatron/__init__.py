"""Galvatron's planner: a parallel strategy for each layer of a model, for jobs of a fixed shape.

After Galvatron (arXiv 2211.13878): strategies are decision trees over the devices of a pipeline stage,
and each layer takes the one with which all layers together are fastest within a limit of memory.
"""

from hydraulis.planner.galvatron.decision_trees import ParallelStrategy, strategies
from hydraulis.planner.galvatron.layers import LayerPlan, plan_layers

__all__ = ["LayerPlan", "ParallelStrategy", "plan_layers", "strategies"]
