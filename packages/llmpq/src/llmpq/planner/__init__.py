"""From times, bytes and noise to a plan: pure functions, without process groups."""

from typing import Any

from shared.registry import Registry

__all__ = ["BASELINES"]

_PLANNERS = "llmpq.planner.baselines"

BASELINES: Registry[str, Any] = Registry("baseline")
"""Functions of a problem, and a dictionary that is kept between a search's problems, that return
placements (bounds, choice) to choose from."""
BASELINES.add("even", f"{_PLANNERS}:even", "as many layers on each device, one width")
BASELINES.add("pipeedge", f"{_PLANNERS}:pipeedge", "the fastest slowest stage, one width")
BASELINES.add("adabits", f"{_PLANNERS}:adabits", "least noise within memory, blind to time")
