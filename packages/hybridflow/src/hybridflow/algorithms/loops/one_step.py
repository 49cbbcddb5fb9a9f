"""The loop that trains on one batch while the next is drawn on ranks of its own.

A batch is drawn with weights one step older than those that learn from it (the first with the same).
Weights are synced between two batches, when neither side is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.algorithms.loops.off_policy import Correction
from hybridflow.algorithms.loops.sync import OnStep
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined

__all__ = ["OneStep"]


@dataclass(kw_only=True)
class OneStep:
    """Draws batch i + 1 while batch i is learnt from.

    Attributes:
        algorithm: what is done with a batch.
        rollout: who draws, on another pool than the actor's.
        prompts: from a step to its prompts.
        correct: what is made of a rollout before it is learnt from.
        step: the next to be learnt from.
    """

    algorithm: Algorithm
    rollout: Rollout | ServedRollout
    prompts: Callable[[int], Batch]
    correct: Correction | None = None
    step: int = 0
    _drawn: Batch | Future | Joined | None = field(default=None, init=False)

    def run(self, steps: int, on_step: OnStep | None = None) -> Iterator[dict[str, float]]:
        """Trains, a step each time that it is asked for the next.

        One batch more is drawn than learnt from, so that another `run` goes on as one would.

        Args:
            steps: how many.
            on_step: called after each step.

        Yields:
            What each step tells.

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
        """What a run goes on from, beside the actor's own state; waits for the batch under way."""
        drawn = self._drawn
        return {
            "step": self.step,
            "drawn": drawn if drawn is None or isinstance(drawn, Batch) else drawn.result(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.step, self._drawn = state["step"], state["drawn"]
