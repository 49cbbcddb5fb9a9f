"""Steps of documents, the next one planned while the current one is computed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hydraulis.config import check_count, check_lengths, keep_fitting
from hydraulis.planner.replicas import ReplicaPlan
from hydraulis.planner.schedule import StepPlan
from hydraulis.planner.steps import cut_steps
from hydraulis.runtime.engine import Engine, PlannedStep
from hydraulis.runtime.steps import to_tokens
from shared.errors import ConfigError

__all__ = ["StepLoader"]

log = logging.getLogger(__name__)

_MOST_READ = 1024
"""Documents that a state's digest reads, evenly over all: reading all may take long."""


class _Ahead(NamedTuple):
    """A plan on its way, and how often tokens had been lowered when it was asked for."""

    plan: Future[StepPlan | ReplicaPlan]
    num_lowered: int


class StepLoader:
    """An epoch's steps, each with its plan; iterate it once an epoch.

    Documents come in a seeded shuffle, each once an epoch. Steps depend on documents, tokens_per_step and
    seed alone: on other ranks the same documents are still to come, but for those that these ranks drop
    or cut.

    Attributes:
        num_planned_late: steps whose plan was not there in time, because planning them failed ahead of
            time or took longer than the step before.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        engine: Engine,
        *,
        tokens_per_step: int,
        seed: int = 0,
        lengths: Sequence[int] | np.ndarray | None = None,
        too_long: str = "raise",
    ) -> None:
        """Looks at all lengths; nothing is planned before the loader is iterated.

        Args:
            documents: by number: 1-D tensors of token ids, lists of them, or bytes. A rank reads those
                that it computes.
            engine: plans and computes the steps.
            tokens_per_step: tokens of a step over all ranks, exceeded by part of its last document.
            seed: of the shuffle; the epoch is added.
            lengths: tokens of all documents; by default each is asked for its length.
            too_long: what becomes of documents longer than all ranks hold together: "raise",
                "drop", or "truncate" to what they hold. Where memory ran out they hold fewer.

        Raises:
            SequenceTooLong: there is such a document, unless it is to be dropped or cut.
            ConfigError: no document is left, or an argument outside its range.
        """
        check_count("tokens_per_step", tokens_per_step)
        known = check_lengths([len(one) for one in documents] if lengths is None else lengths)
        if len(known) != len(documents):
            raise ConfigError(
                f"lengths: expected one for each of {len(documents)} documents, got {len(known)}"
            )
        kept = keep_fitting(known, engine.max_document, too_long)
        engine.check_longest(min(int(known[kept].max()), engine.max_document))
        self._lengths, self._too_long = known, too_long
        self.documents, self.engine = documents, engine
        self.tokens_per_step, self.seed = tokens_per_step, seed
        self.num_planned_late = 0
        self._epoch = self._number = 0

    def steps(self, epoch: int) -> list[np.ndarray]:
        """Numbers of the documents in each step of an epoch."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self._lengths))
        # Cut by all documents: those that these ranks cannot hold, others may.
        cut = cut_steps(self._lengths, order, self.tokens_per_step, 1)
        return [self._kept(step) for step in cut]

    def __len__(self) -> int:
        """Steps of the present epoch."""
        return sum(len(step) > 0 for step in self.steps(self._epoch))

    def __iter__(self) -> Iterator[PlannedStep]:
        steps = self.steps(self._epoch)
        with ThreadPoolExecutor(1, thread_name_prefix="hydraulis-planner") as planner:
            ahead: _Ahead | None = None
            while self._number < len(steps):
                # Memory that ran out since may have lowered what ranks hold.
                number, indices = self._number, self._kept(steps[self._number])
                if not len(indices):  # all of its documents are dropped
                    self._number += 1
                    continue
                plan, is_late = self._taken(ahead, indices)
                self.num_planned_late += is_late
                later = next(
                    (one for one in map(self._kept, steps[number + 1 :]) if len(one)), None
                )
                if later is None:
                    ahead = None
                else:
                    ahead = _Ahead(planner.submit(self._plan, later), self.engine.num_lowered)
                step = PlannedStep(
                    documents=self.documents, indices=tuple(indices.tolist()), plan=plan,
                    epoch=self._epoch, number=number, too_long=self._too_long,
                    cut_at=self.engine.max_document if self._too_long == "truncate" else None,
                    is_late=is_late,
                )  # fmt: skip
                # What is saved while a step is computed has it behind it.
                self._number += 1
                yield step
        self._epoch, self._number = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: behind the last step that it gave."""
        return {
            "epoch": self._epoch, "step": self._number, "seed": self.seed,
            "tokens_per_step": self.tokens_per_step, "num_documents": len(self.documents),
            "num_tokens": int(self._lengths.sum()), "digest": self._digest,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where another loader of the same documents stood, on any number of ranks.

        Raises:
            ConfigError: it was of other documents or of another order of them, of another seed or of
                other steps.
        """
        mine = self.state_dict()
        for key in ("seed", "tokens_per_step", "num_documents", "num_tokens"):
            if state.get(key) != mine[key]:
                raise ConfigError(
                    f"{key}: expected {mine[key]}, as this loader has, got {state.get(key)} of the "
                    f"state; steps would hold other documents"
                )
        if "digest" not in state:
            log.warning("the state of an earlier version does not say which documents it was of")
        elif state["digest"] != mine["digest"]:
            raise ConfigError(
                f"digest: expected {mine['digest']} of these documents, got {state['digest']} of the state: "
                f"they are other ones, or in another order; give the same files, sorted as before"
            )
        self._epoch, self._number = state["epoch"], state["step"]

    @cached_property
    def _digest(self) -> str:
        """16 hexadecimal digits of all lengths in order, and of the tokens of some documents."""
        digest = hashlib.sha256(self._lengths.tobytes())
        count = len(self.documents)
        for number in np.unique(np.linspace(0, count - 1, _MOST_READ).astype(int)).tolist():
            digest.update(to_tokens(self.documents[number], number).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _kept(self, indices: np.ndarray) -> np.ndarray:
        """Documents that are not dropped, as ranks hold tokens now."""
        if self._too_long != "drop":
            return indices
        return indices[self._lengths[indices] <= self.engine.max_document]

    def _plan(self, indices: np.ndarray) -> StepPlan | ReplicaPlan:
        lengths = self._lengths[indices]
        if self._too_long == "truncate":
            lengths = lengths.clip(max=self.engine.max_document)
        return self.engine.plan(lengths)

    def _taken(
        self, ahead: _Ahead | None, indices: np.ndarray
    ) -> tuple[StepPlan | ReplicaPlan, bool]:
        """The plan that was made ahead of time, or one made now; and whether it was late."""
        # Plans of before memory ran out may count on tokens that ranks do not hold any more.
        if ahead is None or ahead.num_lowered < self.engine.num_lowered:
            return self._plan(indices), False
        is_late = not ahead.plan.done()
        try:
            return ahead.plan.result(), is_late
        except Exception as error:  # noqa: BLE001 - planned anew, where it would be raised
            log.warning("planning ahead failed (%r): planning now", error)
            return self._plan(indices), True
