"""The synchronous loop: generate responses, then train on them.

Its only state is the step; to resume, pass it as `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.algorithms.loops.loop_spec import LoopSpec
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch

__all__ = ["SYNC_SPEC", "OnStep", "run"]

OnStep = Callable[[int, dict[str, float]], None]
"""Called after a step with its number, from 0 on, and its metrics: to evaluate, log, or save."""


def run(
    algorithm: Algorithm,
    prompts: Callable[[int], Batch],
    *,
    steps: int,
    start: int = 0,
    rollout: Rollout | ServedRollout | None = None,
    on_step: OnStep | None = None,
) -> Iterator[dict[str, float]]:
    """Trains, one step per iteration.

    Args:
        algorithm: generates and trains on batches.
        prompts: function from a step to its prompts.
        steps: number of steps.
        start: number of the first step.
        rollout: generates responses, after receiving the actor's weights; None: the actor does.
        on_step: called after each step.

    Yields:
        Metrics of each step.

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


SYNC_SPEC = LoopSpec(build=None, is_apart=False)
