"""What ranks did when: the raw material of reports and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from diffusionpipe.planner.plan import Plan

if TYPE_CHECKING:
    from shared.comms import Group

__all__ = ["ActionTime", "RunReport", "StepRecorder", "StepTimes", "collect_report"]

_STEPS_KEPT = 20
"""Steps of which every action is kept; of earlier ones only sums are."""


class ActionTime(NamedTuple):
    """When a rank did something.

    Attributes:
        kind: of an action, or "wait" for messages, or "update" of weights.
        stage: virtual stage, -1 for others.
        micro_batch: -1 for others.
        name: frozen component, or what is waited for.
        start_s, end_s: on the clock of the rank's host.
    """

    kind: str
    stage: int
    micro_batch: int
    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepTimes:
    """One step of a rank.

    Attributes:
        step: its index.
        start_s: when it began, on the clock of the rank's host.
        seconds: from its start to the end of its update.
        pass_s: forward and backward passes and the update.
        filled_s: frozen parts of the next batch.
        waited_s: blocked in waits for messages and sums.
        num_late: encode actions that were moved to the end.
        actions: in order; empty for steps long ago.
    """

    step: int
    start_s: float
    seconds: float = 0.0
    pass_s: float = 0.0
    filled_s: float = 0.0
    waited_s: float = 0.0
    num_late: int = 0
    actions: list[ActionTime] = field(default_factory=list)


class StepRecorder:
    """Times a rank's actions, step by step.

    Attributes:
        steps: all that have ended.
        current: the one under way.
    """

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self.current = StepTimes(-1, 0.0)

    def begin(self, step: int) -> None:
        """Begins a step; one that does not end is forgotten."""
        self.current = StepTimes(step, time.perf_counter())

    def end(self) -> None:
        """Ends the step under way."""
        self.current.seconds = time.perf_counter() - self.current.start_s
        self.steps.append(self.current)
        if len(self.steps) > _STEPS_KEPT:
            self.steps[-_STEPS_KEPT - 1].actions = []

    @contextmanager
    def time(
        self, kind: str, stage: int = -1, micro_batch: int = -1, name: str = ""
    ) -> Iterator[None]:
        """Times a block, as `ActionTime` says."""
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        current = self.current
        current.actions.append(ActionTime(kind, stage, micro_batch, name, start_s, end_s))
        if kind == "wait":
            current.waited_s += end_s - start_s
        elif kind == "encode":
            current.filled_s += end_s - start_s
        else:
            current.pass_s += end_s - start_s


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All ranks' steps, beside what was predicted.

    Attributes:
        steps: by rank, its steps.
        edges: mean bytes of a step by (source rank, target rank), without sums and agreements.
        predicted_s: seconds of a step that the plan predicts.
        predicted_edges: bytes of a step that the plan predicts.
    """

    steps: tuple[tuple[StepTimes, ...], ...]
    edges: Mapping[tuple[int, int], float]
    predicted_s: float
    predicted_edges: Mapping[tuple[int, int], int]

    @property
    def step_s(self) -> float:
        """Median seconds of a step, the slowest rank's each; without the first, which warms up."""
        by_step = list(zip(*self.steps, strict=True))
        return median(max(step.seconds for step in ranks) for ranks in by_step[1:] or by_step)

    def __str__(self) -> str:
        """A table for people."""
        lines = [
            f"{len(self.steps[0])} steps, median {self.step_s:.4g} s, predicted {self.predicted_s:.4g} s",
            "rank  passes s  filled s  waited s  idle s  late jobs",
        ]
        for rank, steps in enumerate(self.steps):
            kept = steps[1:] or steps
            passes, filled, waited, seconds = (
                sum(getattr(step, name) for step in kept) / len(kept)
                for name in ("pass_s", "filled_s", "waited_s", "seconds")
            )
            num_late = sum(step.num_late for step in kept)
            lines.append(
                f"{rank:4}{passes:10.4g}{filled:10.4g}{waited:10.4g}"
                f"{seconds - passes - filled:8.4g}{num_late:11}"
            )
        for (source, target), count in sorted(self.edges.items()):
            planned = self.predicted_edges.get((source, target), 0)
            lines.append(
                f"rank {source} to {target}: {count:,.0f} bytes a step, planned {planned:,}"
            )
        return "\n".join(lines)


def collect_report(
    control: Group | None,
    recorder: StepRecorder,
    sent_bytes: Mapping[int, int],
    plan: Plan,
) -> RunReport:
    """Collects all ranks' records on every rank; every rank calls it.

    Args:
        control: all ranks, for small messages; None in one process.
        recorder: this rank's.
        sent_bytes: by rank, bytes of this one's messages, those before the first step too.
        plan: what was run, with its prediction.
    """
    # Who only reads reports needs no torch, which takes seconds to import.
    from diffusionpipe.runtime.agreement import exchange

    mine = {"steps": [asdict(step) for step in recorder.steps], "sent": list(sent_bytes.items())}
    every = exchange(control, mine)
    num_steps = max(1, len(recorder.steps))
    return RunReport(
        steps=tuple(tuple(map(_read_step, each["steps"])) for each in every),
        edges={
            (rank, peer): count / num_steps
            for rank, each in enumerate(every)
            for peer, count in each["sent"]
            if count
        },
        predicted_s=plan.predicted_s,
        predicted_edges=plan.edges,
    )


def _read_step(tree: dict[str, Any]) -> StepTimes:
    actions = [ActionTime(*action) for action in tree.pop("actions")]
    return StepTimes(**tree, actions=actions)
