"""Chooses what each layer keeps, stores and computes again: the fastest plan within hard limits."""

from __future__ import annotations

from memo.config import Budget
from memo.planner.plan import Plan
from memo.planner.profile import StepProfile

__all__ = ["place"]


def place(profile: StepProfile, budget: Budget, store: str) -> Plan:
    """The fastest plan within a budget, with its prediction.

    Raises:
        DoesNotFit: no plan does; names the bytes that are missing and what would help.
    """
    raise NotImplementedError
