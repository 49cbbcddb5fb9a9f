"""Settings of a continual run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gnnflow.training.link_task import GRAINS, METRICS, Grain
from gnnflow.training.replay import ReplayPolicy
from gnnflow.training.rounds import cut_increments, parse_span
from shared.data.events import Events
from shared.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run cuts a stream, learns from it and evaluates; see `ContinualTrainer`.

    Attributes:
        warmup: share of the stream that is trained on before the first round.
        every: events an increment, or its time as a text: "1D", "12h", where times are seconds; see
            `gnnflow.training.rounds.cut_increments`.
        replay: past events that are trained on with an increment: a share of all there are (with a
            window, of those in it), drawn evenly; or a policy.
        window: time, in the stream's unit or as for `every`, after which edges expire: those older
            than an increment's first event by more.
        grain: "event", each event at its own time; or "batch", each node of a batch once, as of the
            batch's first event, which is cheaper and does not see what happens within the batch.
        negatives: kind of negatives in evaluations, see `Negatives`; training has random ones.
        num_negatives: negatives an event in evaluations. AP and AUC take the first of them.
        metric: "ap", "auc" or "mrr", for the display.
        batch_size: events a batch.
        epochs: passes over what a round trains on.
        warmup_epochs: passes over the warm-up.
        fresh_optimizer: make a new optimizer each round, as published, or keep it.
        restore: put a round's edges into an edge cache at its start, as published.
        seed: of negatives, replay and dropout.
        checkpoint: folder that `run` resumes from, and writes to. Resuming checks stream, features,
            sampling and settings; the optimizer's own settings are not checked.
        checkpoint_every: rounds between two checkpoints.
        progress: show a bar with events a second where standard error is a terminal.

    Raises:
        ConfigError: one is out of range.
    """

    warmup: float = 0.3
    every: int | str = "1D"
    replay: float | ReplayPolicy = 0.05
    window: float | str | None = None
    grain: Grain = "event"
    negatives: str = "random"
    num_negatives: int = 10
    metric: str = "ap"
    batch_size: int = 600
    epochs: int = 1
    warmup_epochs: int = 1
    fresh_optimizer: bool = True
    restore: bool = True
    seed: int = 0
    checkpoint: str | Path | None = None
    checkpoint_every: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        sizes = ("num_negatives", "batch_size", "epochs", "warmup_epochs", "checkpoint_every")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name, known in (("metric", METRICS), ("grain", GRAINS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name}: expected one of {list(known)}, got {getattr(self, name)!r}"
                )
        if self.window is not None:
            parse_span("window", self.window)
        cut_increments(Events([], [], []), self.warmup, self.every)
