"""Continual training on a stream: each increment is evaluated, then trained on.

After GNNFlow's continual loop. A round inserts an increment into the graph, evaluates the model on
its events, and trains on them together with replayed past events. Evaluating after the insertion
leaks nothing, because an event's sample has only edges strictly earlier than it: neither itself nor
others of its time, but earlier ones of its increment, as if events arrived one by one.

Departures: evaluation leaves graph, caches, model and memory unchanged, where the published loop
updates memory twice per increment; nothing is held out for validation, since every increment is
evaluated before it is trained on; and an event's negatives were seen before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import Features
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.checkpoint import Checkpoint, describe_run
from gnnflow.training.history import StreamHistory
from gnnflow.training.link_task import LinkTask, Scores
from gnnflow.training.replay import UniformReplay
from gnnflow.training.report import describe_round
from gnnflow.training.rounds import Round, StageClock, check_span, cut_increments
from gnnflow.training.settings import Settings
from gnnflow.training.subnormal import flush_subnormals
from shared.data.events import Events
from shared.errors import ConfigError, DataError, DivergenceError
from shared.kernels.philox import stream_key
from shared.training import check_loss, check_shapes, log_resumed
from shared.training.progress import show_progress

__all__ = ["ContinualTrainer", "OptimizerMaker", "Round"]

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class ContinualTrainer:
    """Trains a link predictor on a stream, one increment after the other.

    Args:
        model: maps a sample of `sampler` and its `Inputs` to embeddings [num_roots, dim]; see
            `gnnflow.training.link_task`. Everything is computed on its parameters' device.
        graph: graph that the stream is inserted into, usually empty.
        sampler: sampler of `graph`.
        features: a store, or a cache of one; None for no features. If a store with edge features
            lacks rows of an increment, they are appended from its events.
        settings: settings of the run; `Settings()` by default.
        head: computes logits of links; a `LinkHead` of the model's `dim` by default.
        optimizer: maps parameters to an optimizer; Adam with learning rate 0.001 by default.
        changes: single settings by name, in place of those of `settings`.

    Attributes:
        rounds: rounds of the run so far.
        warmed: the warm-up as a round, once it is done.

    Raises:
        ConfigError: a setting is out of range, the sampler is of another graph, or the model has
            only some of the memory hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: TemporalGraph,
        sampler: TemporalSampler,
        features: Features | FeatureCache | None = None,
        settings: Settings | None = None,
        *,
        head: nn.Module | None = None,
        optimizer: OptimizerMaker | None = None,
        **changes: Any,
    ) -> None:
        self.settings = given = replace(settings or Settings(), **changes)
        if sampler.graph is not graph:
            raise ConfigError("sampler: expected a sampler of the graph given, got another graph's")
        head = _make_head(model) if head is None else head
        replay = given.replay
        if isinstance(replay, int | float):
            replay = UniformReplay(replay, seed=given.seed)
        device = next((p.device for p in model.parameters()), graph.device)
        self.model, self.head, self.sampler = model, head.to(device), sampler
        self.clock = StageClock(device)
        self.task = LinkTask(model, head, sampler, given.batch_size, self.clock, given.grain)
        self.history = StreamHistory(
            graph,
            features,
            replay,
            negatives=given.negatives,
            window=given.window,
            seed=given.seed,
            clock=self.clock,
        )
        self.rounds: list[Round] = []
        self.warmed: Round | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        # Further keys of a round's dropout, besides seed and round; ranks add their number.
        self._stream: tuple[int, ...] = ()
        self._make_optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=1e-3))
        self._folder = None if given.checkpoint is None else Path(given.checkpoint)

    def run(self, events: Events) -> Iterator[Round]:
        """Warms up, and then yields a round for each increment.

        With a checkpoint of the same stream and settings the run resumes: earlier rounds are
        yielded from the checkpoint, later ones equal those of an uninterrupted run.

        Raises:
            ConfigError: the trainer has run already.
            DataError: there are no events; times are no seconds where `every` or `window` has a unit;
                a checkpoint is damaged or of another run; or graph or features refuse an event.
            DivergenceError: the loss is not finite, or a score is NaN.
        """
        if self.rounds or self.warmed:
            raise ConfigError("expected a trainer that has not run; make another, with a new graph")
        if not len(events):
            raise DataError("run: expected at least one event, got none")
        events = events.sorted()
        for name in ("every", "window"):
            check_span(name, getattr(self.settings, name), events)
        first, ends = cut_increments(events, self.settings.warmup, self.settings.every)
        self.history.negatives.since = events.t[first].item()
        saved = self._open_checkpoint(events)
        done = self._resume(saved, events) if saved else 0
        if saved and done:
            log_resumed(len(self.rounds), saved.folder)
        if not done and self.task.memory is not None:
            self.task.memory.reset_state()
        with show_progress(
            "warm-up, events", len(events), is_shown=self.settings.progress
        ) as progress:
            progress.reach(done)
            if done < first:
                self.warmed = self._warm_up(events[:first])
                if saved:
                    saved.write(first, self.state_dict())
                progress.reach(first)
            yield from list(self.rounds)
            for start, end in zip([first, *ends], ends, strict=False):
                if end <= done:
                    continue
                found = self._round(events, start, end)
                self.rounds.append(found)
                if saved and (
                    found.index % self.settings.checkpoint_every == 0 or end == len(events)
                ):
                    saved.write(end, self.state_dict())
                progress.reach(end, describe_round(found, self.settings.metric))
                yield found

    def restore(self, events: Events) -> None:
        """Takes weights, memory and graph from the checkpoint of a run that has ended.

        Args:
            events: the whole stream of that run.

        Raises:
            ConfigError: the trainer has no checkpoint, or has run already.
            DataError: the run has not ended, is of another stream or setting, or is damaged.
        """
        events, saved = events.sorted(), self._open_checkpoint(events.sorted())
        if saved is None or self.rounds or self.warmed:
            raise ConfigError("restore: expected a new trainer with a checkpoint; make another")
        if (done := self._resume(saved, events)) < len(events):
            raise DataError(
                f"{self._folder}: expected a run that has ended, it has learnt from {done:,} of "
                f"{len(events):,} events; resume it first"
            )

    @flush_subnormals()
    def score(self, events: Events) -> Float[Tensor, " num_events"]:
        """Logits of links as of their times, from edges strictly earlier; changes nothing.

        Args:
            events: links that may or may not come about, in any order.

        Returns:
            In the order of `events`; `sigmoid` makes a probability of it, against a random
            destination.
        """
        self.sampler.set_epoch(0)
        order = events.t.argsort(stable=True)
        found = torch.empty(len(events))
        found[order] = self.task.predict(events[order], self.history.features)
        return found

    @flush_subnormals()
    def evaluate(self, events: Events) -> Scores:
        """Scores events against negatives, each from edges strictly earlier than it.

        Leaves graph, caches, model and memory unchanged.

        Args:
            events: sorted by time; in the graph, or later than all its edges.

        Raises:
            DataError: there are no events, or one has no negative.
        """
        if not len(events):
            raise DataError("evaluate: expected at least one event, got none")
        negatives = self.history.negatives.draw(events, self.settings.num_negatives)
        self.sampler.set_epoch(0)
        return self.task.evaluate(events, negatives, self.history.features)

    @flush_subnormals()
    def _warm_up(self, events: Events) -> Round:
        self.clock.take()
        self.history.insert(events)
        loss = self._learn(events[:0], events, 0)
        about: dict[str, Any] = {"num_events": len(events), "num_replayed": 0, "loss": loss}
        return Round(index=0, time=events.t[0].item(), **about, **self.clock.take())

    @flush_subnormals()
    def _round(self, events: Events, start: int, end: int) -> Round:
        self.clock.take()
        new, index = events[start:end], len(self.rounds) + 1
        self.history.insert(new, since=self.history.bound(new))
        with self.clock.stage("evaluate"):
            try:
                scores = self.evaluate(new)
            except DivergenceError as error:
                raise DivergenceError(f"round {index}: {error}") from error
        replayed = self.history.draw_replayed(events, start, index)
        about: dict[str, Any] = {"num_events": len(new), "num_replayed": len(replayed)}
        about |= {"loss": self._learn(replayed, new, index)} | scores._asdict()
        return Round(index=index, time=new.t[0].item(), **about, **self.clock.take())

    def _learn(self, replayed: Events, new: Events, index: int) -> float:
        """Trains on replayed events and then new ones; returns the mean loss of the last pass."""
        features, memory = self.history.features, self.task.memory
        if self.settings.restore and isinstance(features, FeatureCache) and features.dim("edge"):
            with self.clock.stage("fetch"):
                features.restore(torch.cat([replayed.eid, new.eid]))
        if self.optimizer is None or self.settings.fresh_optimizer:
            self.optimizer = self.make_optimizer()
        # Each pass starts from this memory, so that each new event is committed once.
        before = None if memory is None else memory.state()
        device, loss = self.clock.device, math.nan
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(stream_key(self.settings.seed, index, *self._stream) >> 1)
            for epoch in range(self.settings.epochs if index else self.settings.warmup_epochs):
                if memory is not None and before is not None and epoch:
                    memory.load_state(before)
                loss = self._pass(replayed, new, stream_key(index, epoch))
        check_loss(loss, f"round {index}")
        return loss

    def _pass(self, replayed: Events, new: Events, stream: int) -> float:
        assert self.optimizer is not None, "made before the first pass"
        self.sampler.set_epoch(stream)
        total = torch.zeros((), dtype=torch.float64)
        for events in (replayed, new):
            with self.clock.stage("sample"):
                negatives = self.history.training_negatives.draw(events, stream=stream)
            total += self.task.train(
                events, negatives, self.history.features, self.optimizer, remember=events is new
            ).cpu()
        return float(total) / (len(replayed) + len(new))

    def state_dict(self) -> dict[str, Any]:
        """State to resume from, without the graph: weights, memory, optimizer, rounds."""
        memory, optimizer = self.task.memory, self.optimizer
        if self.settings.fresh_optimizer:
            optimizer = None
        return {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "memory": None if memory is None else memory.state(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "warmed": self.warmed and self.warmed.to_json(),
            "rounds": [one.to_json() for one in self.rounds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; graph and features stay.

        Raises:
            DataError: the state is of another model or head; nothing is restored then.
        """
        modules = {"model": self.model, "head": self.head}
        saved, here = (
            {f"{name}.{key}": one.shape for name in modules for key, one in tensors[name].items()}
            for tensors in (state, {name: one.state_dict() for name, one in modules.items()})
        )
        check_shapes(self._folder or "the state", saved, here)
        for name, module in modules.items():
            module.load_state_dict(state[name])
        if self.task.memory is not None:
            self.task.memory.load_state(state["memory"])
        if state["optimizer"] is not None:
            self.optimizer = self.make_optimizer()
            self.optimizer.load_state_dict(state["optimizer"])
        self.warmed = state["warmed"] and Round.from_json(state["warmed"])
        self.rounds = [Round.from_json(row) for row in state["rounds"]]

    def _open_checkpoint(self, events: Events) -> Checkpoint | None:
        if self._folder is None:
            return None
        run = describe_run(events, self.sampler, self.history, self.settings)
        return Checkpoint(self._folder, run)

    def _resume(self, saved: Checkpoint, events: Events) -> int:
        """Restores a checkpoint and inserts its events; returns how many, 0 without one."""
        found = saved.read()
        if found is None:
            return 0
        done, state = found
        self.load_state_dict(state)
        last = self.rounds[-1].num_events if self.rounds else done
        bound = self.history.bound(events[done - last : done])
        self.history.insert(events[:done], since=bound)
        return done

    def make_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer of the model's and the head's parameters."""
        params = [*self.model.parameters(), *self.head.parameters()]
        return self._make_optimizer(params)


def _make_head(model: nn.Module) -> nn.Module:
    from gnnflow.models import LinkHead

    dim = getattr(model, "dim", None)
    if not isinstance(dim, int):
        raise ConfigError(
            f"head: expected one, since {type(model).__name__} has no dim, the columns of its "
            "embeddings; give head=LinkHead(columns)"
        )
    return LinkHead(dim)
