"""An epoch's documents to steps, and a step's documents to ranks and micro-batches."""

from hydraulis.planner.steps.cutting import count_steps, cut_epoch, cut_steps
from hydraulis.planner.steps.slots import SYNCS, plan_ranks, plan_slots

__all__ = ["SYNCS", "count_steps", "cut_epoch", "cut_steps", "plan_ranks", "plan_slots"]
