"""Training epochs over a stream, each from an empty memory, with bitwise exact resumption."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.data.sampler import Sampler
from mspipe.evaluation import evaluate
from mspipe.pipeline.iteration import Output
from mspipe.pipeline.pipeline import Pipeline
from shared.errors import ConfigError, DataError
from shared.files import atomic_file
from shared.kernels.philox import stream_key
from shared.training import check_loss, check_shapes, log_resumed
from shared.training.progress import show_progress

__all__ = ["Epoch", "Settings", "fit", "restore"]

_FORMAT = "mspipe training 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a training run.

    Attributes:
        epochs: number of passes over the stream.
        batch_size, cut: see `batches`.
        seed: seed of negatives, dropout and the cut.
        save_every: batches between two checkpoints; the pipeline drains before each.

    Raises:
        ConfigError: a number is out of range.
    """

    epochs: int = 3
    batch_size: int = 600
    cut: str = "uniform"
    seed: int = 0
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Result of one pass over the events.

    Attributes:
        index: number of the pass, from 1.
        losses: losses of its batches.
        seconds: time spent in the pipeline by the process that finished the pass.
        scores: metrics on the validation events; empty without any.
        events_per_s: rate of that process in this pass, without its first batch of all, in which
            kernels are compiled; 0 where that was the only one.
    """

    index: int
    losses: list[float]
    seconds: float
    scores: dict[str, float]
    events_per_s: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss over batches."""
        return sum(self.losses) / len(self.losses)


def fit(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    train: Events,
    validate: Events | None = None,
    settings: Settings | None = None,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Iterator[Epoch]:
    """Trains passes over the events and yields each one's result; a pass starts with empty memory.

    With a checkpoint of the same stream and settings training resumes: finished passes are yielded
    as recorded, and losses, weights and memory are bitwise those of an uninterrupted run.

    Args:
        pipe: pipeline with model and memory.
        optimizer: optimizer of the model's parameters.
        train: training events by time.
        validate: events after `train`; scored after each pass with the memory that it leaves.
        settings: epochs, batches, seed and checkpoint interval; `Settings()` by default.
        checkpoint: folder to resume from and to write to, shared by all workers; None for none.
        progress: show progress on standard error: a bar on a terminal, else a line every ten seconds.

    Raises:
        DataError: there are no events, or the checkpoint is damaged or of another run.
        DivergenceError: a loss is NaN or infinite.
    """
    settings = settings or Settings()
    if not len(train):
        raise DataError("fit: expected at least one event to learn from, got none")
    saved = None if checkpoint is None else _Checkpoint(Path(checkpoint), pipe, settings, train)
    done, losses, epochs = saved.resume(optimizer) if saved else (0, [], [])
    if saved and (done or epochs) and not pipe.workers.rank:
        log_resumed(sum(len(epoch.losses) for epoch in epochs) + done, saved.folder)
    yield from epochs
    negatives, is_cold = Negatives(train), True
    for index in range(len(epochs), settings.epochs):
        if not done:
            pipe.memory.reset()
            losses = []
        key = stream_key(settings.seed, index) >> 1
        cut = list(batches(train, settings.batch_size, negatives, cut=settings.cut, seed=key))
        seconds = warm_s = 0.0
        num_warm = 0
        is_shown = progress and not pipe.workers.rank
        with show_progress(f"epoch {index + 1}, events", len(train), is_shown=is_shown) as bar:
            bar.advance(sum(len(batch.events) for batch in cut[:done]))
            while done < len(cut):
                # Without a checkpoint the pipeline never drains within a pass.
                stop = len(cut) if saved is None else min(len(cut), done + settings.save_every)
                for out in _seeded(pipe.train(cut[done:stop]), key, done):
                    optimizer.zero_grad()
                    out.loss.backward()
                    optimizer.step()
                    losses.append(pipe.workers.gather(out.loss.detach()[None]).mean().item())
                    text = f"epoch {index + 1}, loss {losses[-1]:.4f}, events"
                    bar.advance(len(out.batch.events), text)
                    check_loss(losses[-1], f"epoch {index + 1}, batch {len(losses) - 1}")
                report = pipe.report()
                seconds += report.elapsed_s
                warm_s += report.warm_s if is_cold else report.elapsed_s
                num_warm += sum(len(batch.events) for batch in cut[done + is_cold : stop])
                done, is_cold = stop, False
                if saved and done < len(cut):
                    saved.write(optimizer, done, losses, epochs)
        scores = {}
        if validate is not None and len(validate):
            scores = evaluate(pipe, validate, history=train, batch_size=settings.batch_size)
        rate = num_warm / warm_s if num_warm and warm_s else 0.0
        epochs.append(
            Epoch(index=index + 1, losses=losses, seconds=seconds, scores=scores, events_per_s=rate)
        )
        done = 0
        if saved:
            saved.write(optimizer, 0, [], epochs)
        yield epochs[-1]


def restore(
    pipe: Pipeline, train: Events, settings: Settings, checkpoint: str | Path
) -> list[Epoch]:
    """Takes weights and memory as a run of `fit` left them at its end.

    Args:
        pipe: pipeline with model and memory, made as for the run.
        train: the events that the run learnt from.
        settings: the run's settings.
        checkpoint: the run's folder.

    Returns:
        The passes of the run.

    Raises:
        DataError: there is no checkpoint, it is damaged or of another run, or the run has not ended.
    """
    done, _, epochs = _Checkpoint(Path(checkpoint), pipe, settings, train).resume(None)
    if done or len(epochs) < settings.epochs:
        raise DataError(
            f"{checkpoint}: expected a run that has ended, it has done {len(epochs)} of "
            f"{settings.epochs} passes; resume it first"
        )
    return epochs


def _seeded(run: Generator[Output, None, None], key: int, first: int) -> Iterator[Output]:
    """Seeds dropout for each batch, so that a resumed pass draws the same, on any device."""
    try:
        for number in count(first):
            torch.manual_seed(stream_key(key, number) >> 1)
            if (out := next(run, None)) is None:
                return
            yield out
    finally:
        run.close()


class _Checkpoint:
    """The checkpoint file, which is replaced atomically."""

    def __init__(
        self,
        folder: Path,
        pipe: Pipeline,
        settings: Settings,
        train: Events,
    ) -> None:
        self.folder, self._path = folder, folder / "training.pt"
        self._pipe = pipe
        # The number of passes and the interval may change on resuming; all else must be the same.
        asked = {k: v for k, v in asdict(settings).items() if k not in ("epochs", "save_every")}
        self._run = asked | {
            "events": len(train),
            "first and last": (train.t[0].item(), train.t[-1].item()),
            "nodes": int(train.src.sum() + train.dst.sum()),
            "digest": train.digest(),
            "model": type(pipe.model).__name__,
        }

    def write(
        self, optimizer: torch.optim.Optimizer, done: int, losses: list[float], epochs: list[Epoch]
    ) -> None:
        if self._pipe.workers.rank:
            return  # the first worker writes for all
        state = {
            "format": _FORMAT,
            "run": self._run,
            "done": done,
            "losses": losses,
            "epochs": json.dumps([asdict(epoch) for epoch in epochs]),
            "model": self._pipe.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "memory": self._pipe.memory.snapshot(),
            "begin": getattr(self._pipe.sampler, "begin", None),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # torch tells why it cannot write where Python has opened the file.
        with atomic_file(self._path) as partial, partial.open("wb") as file:
            torch.save(state, file)

    def resume(
        self, optimizer: torch.optim.Optimizer | None
    ) -> tuple[int, list[float], list[Epoch]]:
        """Number of finished batches in the current pass, their losses, and the finished passes."""
        if not self._path.exists():
            return 0, [], []
        state = self._read()
        for name, here in self._run.items():
            # A file of version 0.1.0 has no digest.
            if (there := state["run"].get(name, here)) != here:
                raise DataError(
                    f"{self._path} was written with {name} {there!r}, this run has {here!r}; resume with "
                    f"the same stream and settings, or give another folder"
                )
        model = self._pipe.model
        saved, here = (
            {f"model.{key}": one.shape for key, one in tensors.items()}
            for tensors in (state["model"], model.state_dict())
        )
        check_shapes(self.folder, saved, here)
        model.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        self._pipe.memory.restore(state["memory"])
        # JODIE's time counted from 0 in runs that saved no begin.
        begin = state.get("begin", 0.0)
        if isinstance(self._pipe.sampler, Sampler) and begin is not None:
            self._pipe.sampler.begin = begin
        epochs = [Epoch(**row) for row in json.loads(state["epochs"])]
        return state["done"], state["losses"], epochs

    def _read(self) -> dict[str, Any]:
        try:
            state = torch.load(self._path, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"{self._path}: damaged ({type(error).__name__}); remove it to begin again"
            ) from error
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise DataError(f"{self._path}: expected the format {_FORMAT!r}; give another folder")
        return state
