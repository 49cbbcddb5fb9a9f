"""The one-step loop: trains on one batch while other ranks generate the next.

A batch is generated with weights one step older than those trained on it (the first with the same).
Weights are synced between two batches, when neither side is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.algorithms.loops.loop_spec import LoopInputs, LoopSpec
from hybridflow.algorithms.loops.off_policy import Correction
from hybridflow.algorithms.loops.sync import OnStep
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined

__all__ = ["ONE_STEP_SPEC", "OneStep"]


@dataclass(kw_only=True)
class OneStep:
    """Generates batch i + 1 while training on batch i.

    Attributes:
        algorithm: trains on batches.
        rollout: generates responses, on another pool than the actor's.
        prompts: function from a step to its prompts.
        correct: function applied to a rollout before training; None: none.
        step: number of the next training step.
    """

    algorithm: Algorithm
    rollout: Rollout | ServedRollout
    prompts: Callable[[int], Batch]
    correct: Correction | None = None
    step: int = 0
    _drawn: Batch | Future | Joined | None = field(default=None, init=False)

    def run(self, steps: int, on_step: OnStep | None = None) -> Iterator[dict[str, float]]:
        """Trains, one step per iteration.

        One more batch is generated than trained on, so that a further `run` continues like a single
        longer one.

        Args:
            steps: number of steps.
            on_step: called after each step.

        Yields:
            Metrics of each step.

        Raises:
            RankFailure: if a rank raised or died.
            CommError: if weights did not arrive as they were sent.
        """
        for _ in range(steps):
            roll = self._draw(self.step) if self._drawn is None else self._drawn
            self._drawn = self._draw(self.step + 1)
            if self.correct is not None:
                roll = self.correct(roll)
            metrics = dict(self.algorithm.learn(roll))
            self.step += 1
            if on_step is not None:
                on_step(self.step - 1, metrics)
            yield metrics

    def _draw(self, step: int) -> Future | Joined:
        self.rollout.take_weights(self.algorithm.actor)
        return self.algorithm.rollout(self.prompts(step), step, self.rollout)

    def state(self) -> dict[str, Any]:
        """State to resume from, besides the actor's; waits for the batch in progress."""
        drawn = self._drawn
        return {
            "step": self.step,
            "drawn": drawn if drawn is None or isinstance(drawn, Batch) else drawn.result(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self.step, self._drawn = state["step"], state["drawn"]


def _build(inputs: LoopInputs) -> OneStep:
    return OneStep(
        algorithm=inputs.algorithm,
        rollout=inputs.rollouts[0],
        prompts=inputs.prompts,
        correct=inputs.correct,
    )


ONE_STEP_SPEC = LoopSpec(build=_build)
