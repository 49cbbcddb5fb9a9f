"""The asynchronous loop: rollouts generate while the actor trains, at most eta steps apart.

After AReaL (arXiv 2505.24298): the number of prompts in progress is bounded by the number of
training steps done, see `hybridflow.loops.buffer`. A rollout receives weights only when it is idle,
so that training does not wait for busy ones, and all tokens of a response come from one version.
With eta 0 this is the synchronous loop, bit for bit if one rollout generates whole batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.algorithms.dataflow import Algorithm
from hybridflow.algorithms.loops.buffer import Buffer
from hybridflow.algorithms.loops.loop_spec import LoopInputs, LoopSpec
from hybridflow.algorithms.loops.off_policy import Correction
from hybridflow.algorithms.loops.sync import OnStep
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from shared.errors import CommError, ConfigError, RankFailure

__all__ = ["ASYNC_SPEC", "Asynchronous"]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Replica:
    """A rollout and its state.

    Attributes:
        version: of its weights, in training steps; None before the first sync.
        positions: of its prompts in progress.
        roll: the future of their responses, None while it is idle.
    """

    rollout: Rollout | ServedRollout
    version: int | None = None
    positions: Sequence[int] = ()
    roll: Future | Joined | None = None


@dataclass(kw_only=True)
class Asynchronous:
    """Generates and trains at once.

    A rollout whose rank raises, or whose weights did not arrive, is dropped, and its prompts go to
    the others. A rank that dies ends all ranks of its engine: resume from a checkpoint. Work is
    assigned between training steps, never during one.

    Attributes:
        algorithm: trains on batches.
        rollouts: generate responses, each on a pool of its own.
        prompts: function from a step to its prompts, equally many each.
        eta: bound on staleness, in steps between the weights that generate and those trained.
        max_running: most prompts in progress; None: bounded by eta only.
        chunk: most prompts that a rollout gets at once; None: its share of a batch.
        correct: function applied to a rollout before training; None: none.
        step: number of the next training step.

    Raises:
        ConfigError: if there is no rollout, or a number is out of range.
    """

    algorithm: Algorithm
    rollouts: Sequence[Rollout | ServedRollout]
    prompts: Callable[[int], Batch]
    eta: int = 1
    max_running: int | None = None
    chunk: int | None = None
    correct: Correction | None = None
    step: int = 0
    buffer: Buffer = field(init=False)

    def __post_init__(self) -> None:
        if not self.rollouts or (self.chunk is not None and self.chunk < 1):
            raise ConfigError(
                f"expected at least one rollout and a chunk of at least 1, got "
                f"{len(self.rollouts)} and {self.chunk}"
            )
        size = len(self.prompts(self.step))
        self.buffer = Buffer(
            batch_size=size, eta=self.eta, max_running=self.max_running, version=self.step
        )
        self._most = self.chunk or -(-size // len(self.rollouts))
        self._replicas = [_Replica(rollout) for rollout in self.rollouts]

    def run(self, steps: int, on_step: OnStep | None = None) -> Iterator[dict[str, float]]:
        """Trains, one step per iteration.

        Args:
            steps: number of steps.
            on_step: called after each step.

        Yields:
            Metrics of each step, with "staleness": the largest number of steps between the weights
            that generated a response and those trained on it.

        Raises:
            RankFailure: if a rank of the actor raised, the last rollout failed, or a rank died.
        """
        for _ in range(steps):
            roll, versions = self._next_batch()
            if self.correct is not None:
                roll = self.correct(roll)
            metrics = dict(self.algorithm.learn(roll))
            metrics["staleness"] = float(self.step - min(versions))
            self.step += 1
            if on_step is not None:
                on_step(self.step - 1, metrics)
            yield metrics

    def _next_batch(self) -> tuple[Batch, list[int]]:
        self._advance()
        while (found := self.buffer.take(self.step)) is None:
            self._wait()
            self._advance()
        return Batch.concat(found[0]), found[1]

    def _wait(self) -> None:
        """Waits until a busy rollout has finished."""
        under_way = [replica.roll for replica in self._replicas if replica.roll is not None]
        assert under_way, "what is missing of the next batch may always be drawn for"
        self.algorithm.actor.pool.workers.wait_any(under_way)

    def _advance(self) -> None:
        """Collects finished rollouts, and starts idle ones."""
        for replica in list(self._replicas):
            if replica.roll is not None and replica.roll.is_done:
                self._collect(replica, replica.roll)
        for replica in list(self._replicas):
            if replica.roll is None and self.buffer.room(self.step):
                self._launch(replica)

    def _collect(self, replica: _Replica, roll: Future | Joined) -> None:
        positions, replica.positions, replica.roll = replica.positions, (), None
        try:
            rows = roll.result()
        except RankFailure as error:
            self.buffer.give_back(positions)
            self._let_go(replica, error)
            return
        assert replica.version is not None, "it was given weights before it drew"
        for position, group in zip(positions, rows.chunk(len(positions)), strict=True):
            self.buffer.finish(position, replica.version, group)

    def _launch(self, replica: _Replica) -> None:
        if replica.version != self.step:
            try:
                replica.rollout.take_weights(self.algorithm.actor)
            except (RankFailure, CommError) as error:
                self._let_go(replica, error)
                return
            replica.version = self.step
        positions = self.buffer.admit(self.step, self._most)
        batch, first = divmod(positions[0], self.buffer.batch_size)
        rows = [first + position - positions[0] for position in positions]
        prompts = self.prompts(batch).reorder(rows)
        replica.positions = positions
        replica.roll = self.algorithm.rollout(prompts, batch, replica.rollout)

    def _let_go(self, replica: _Replica, error: Exception) -> None:
        self._replicas.remove(replica)
        name = replica.rollout.name
        if not self._replicas:
            raise RankFailure(f"{name}, the last of the rollouts, failed: {error}") from error
        log.warning("%s failed, and %d are left: %s", name, len(self._replicas), error)

    def state(self) -> dict[str, Any]:
        """State to resume from, besides the actor's; waits for all generation in progress."""
        while any(replica.roll is not None for replica in self._replicas):
            self._wait()
            for replica in list(self._replicas):
                if replica.roll is not None and replica.roll.is_done:
                    self._collect(replica, replica.roll)
        return {"step": self.step, "buffer": self.buffer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`; call it before `run`."""
        self.step = state["step"]
        self.buffer.load_state(state["buffer"])
        for replica in self._replicas:
            replica.version = None


def _build(inputs: LoopInputs) -> Asynchronous:
    return Asynchronous(
        algorithm=inputs.algorithm,
        rollouts=inputs.rollouts,
        prompts=inputs.prompts,
        correct=inputs.correct,
        eta=inputs.eta,
    )


ASYNC_SPEC = LoopSpec(build=_build, has_eta=True, has_replicas=True)
