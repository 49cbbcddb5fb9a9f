"""A loop as recipes name it: what it needs, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.algorithms.loops.off_policy import Correction
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch

__all__ = ["LoopInputs", "LoopSpec"]


@dataclass(frozen=True, kw_only=True)
class LoopInputs:
    """What a recipe's loop is made from.

    Attributes:
        algorithm: generates and trains on batches.
        prompts: function from a step to its prompts.
        rollouts: generate responses, each on a pool of its own.
        correct: function applied to a rollout before training; None: none.
        eta: bound on staleness, for loops that have one.
    """

    algorithm: Algorithm
    prompts: Callable[[int], Batch]
    rollouts: Sequence[Rollout | ServedRollout]
    correct: Correction | None
    eta: int


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """A loop that recipes can name; an entry of `hybridflow.algorithms.registry.LOOPS`.

    Attributes:
        build: makes an object with `run(steps)`, `state()` and `load_state(state)`, as `OneStep`
            has; None for the synchronous loop, whose only state is the step.
        is_apart: whether generation and training run at once, so that a rollout needs a pool of its
            own and its weights may be stale.
        has_eta: whether it has a bound on staleness.
        has_replicas: whether each replica of the rollout is a rollout of its own.
    """

    build: Callable[[LoopInputs], Any] | None
    is_apart: bool = True
    has_eta: bool = False
    has_replicas: bool = False
