"""A training step under a plan, replayed: seconds, peak of memory, bytes in the store.

The moves are those that the runtime carries out (`planner.schedule`), on three queues: compute, out
to the store, and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo.planner.plan import Plan
from memo.planner.profile import StepProfile
from shared.topology.replay import Timeline

__all__ = ["Prediction", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes.

    Attributes:
        step_s: seconds of forward and backward.
        peak_bytes: most bytes on the device, fixed ones included.
        store_bytes: most bytes in the store.
        exposed_s: seconds that layers wait for copies.
        replayed_s: seconds of what is computed again.
        timeline: of the replay; queues "compute", "out" and "back".
    """

    step_s: float
    peak_bytes: int
    store_bytes: int
    exposed_s: float
    replayed_s: float
    timeline: Timeline


def simulate(plan: Plan, profile: StepProfile) -> Prediction:
    """Replays one step."""
    raise NotImplementedError
