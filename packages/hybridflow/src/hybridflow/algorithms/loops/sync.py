"""The loop in which everything waits for what comes before: draw responses, then learn from them.

What it is at is the step, which is all there is to resume: give it as `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch

__all__ = ["OnStep", "run"]

OnStep = Callable[[int, dict[str, float]], None]
"""Called after a step with its number, from 0 on, and what it tells: to evaluate, log, or save."""


def run(
    algorithm: Algorithm,
    prompts: Callable[[int], Batch],
    *,
    steps: int,
    start: int = 0,
    rollout: Rollout | ServedRollout | None = None,
    on_step: OnStep | None = None,
) -> Iterator[dict[str, float]]:
    """Trains, a step each time that it is asked for the next.

    Args:
        algorithm: what is done with a batch.
        prompts: from a step to its prompts.
        steps: how many.
        start: the first one's number.
        rollout: who draws responses, given the actor's weights before; the actor itself when None.
        on_step: called after each step.

    Yields:
        What each step tells.

    Raises:
        RankFailure: if a rank raised or died.
    """
    for step in range(start, start + steps):
        if rollout is not None:
            rollout.take_weights(algorithm.actor)
        metrics = dict(algorithm.learn(algorithm.rollout(prompts(step), step, rollout)))
        if on_step is not None:
            on_step(step, metrics)
        yield metrics
