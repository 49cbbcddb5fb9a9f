"""Link prediction: one pass of a model over events, to score them or to train on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.features.cache import FeatureCache
from gnnflow.features.inputs import Inputs, attach
from gnnflow.features.store import Features
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.rounds import StageClock
from shared.data.events import Events
from shared.data.metrics import auc, average_precision, mrr
from shared.errors import ConfigError

__all__ = ["GRAINS", "METRICS", "Grain", "HasMemory", "LinkTask", "Scores"]

Grain = Literal["event", "batch"]
GRAINS = get_args(Grain)
Negatives = Int64[Tensor, "num_events num_negatives"]


@runtime_checkable
class HasMemory(Protocol):
    """Hooks of a model that remembers events: all four, or none."""

    def reset_state(self) -> None:
        """Forgets everything."""
        ...

    def commit(self, events: Events) -> None:
        """Remembers events; called for each event once, in order, after its batch."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What is remembered, as a copy."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Remembers what `state` gave, and nothing else."""
        ...


class Scores(NamedTuple):
    """How well events are separated from negatives; AP and AUC use the first negative of each."""

    ap: float
    auc: float
    mrr: float


METRICS = tuple(Scores.__annotations__)


class LinkTask:
    """Scores links by the embeddings of their ends at the time of the event.

    A model that ignores time (`uses_time` False) is asked about the graph as it was before the first
    event of a batch, so that a node that occurs in it many times is embedded once.

    Args:
        model: (sample, inputs) -> [num_roots, dim], wherever those lie; its `layout` says which
            sample it takes, "mfg" if it has none. May have the hooks of `HasMemory`.
        head: (sources, destinations) -> logits: of [n, dim] and [n, dim] are [n], and of [n, 1, dim]
            and [n, k, dim] are [n, k].
        sampler: of the graph.
        batch_size: events a batch.
        clock: of the model's device; counts the stages "sample", "fetch" and "train".
        grain: "event", each event at its own time; "batch", each node of a batch once, as of its
            first event.

    Raises:
        ConfigError: the model has some of the hooks only.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module,
        sampler: TemporalSampler,
        batch_size: int,
        clock: StageClock,
        grain: Grain = "event",
    ) -> None:
        self.model, self.head, self.sampler = model, head, sampler
        self.batch_size, self.clock = batch_size, clock
        # A model wrapped for data parallelism has its attributes one level down.
        plain: Any = getattr(model, "module", model)
        self.memory = plain if isinstance(plain, HasMemory) else None
        hooks = ["reset_state", "commit", "state", "load_state"]
        there = [name for name in hooks if hasattr(plain, name)]
        if there and self.memory is None:
            raise ConfigError(f"model: expected the hooks {hooks} or none of them, got {there}")
        self._layout: Any = getattr(plain, "layout", "mfg")
        self.grain: Grain = grain
        self._is_as_of_batch = grain == "batch" or not getattr(plain, "uses_time", True)

    def score(
        self, events: Events, negatives: Negatives, features: Features | FeatureCache | None
    ) -> tuple[Float[Tensor, " num_events"], Float[Tensor, "num_events num_negatives"]]:
        """Logits of one batch of events and of their negatives.

        Args:
            events: sorted by time.
            negatives: other destinations of each event, embedded at its time.
            features: source of feature rows; None for none.

        Raises:
            DataError: an id has no row of features.
        """
        num_events, num_negatives = negatives.shape
        t = events.t[:1].expand(num_events) if self._is_as_of_batch else events.t
        nodes = torch.cat([events.src, events.dst, negatives.flatten()])
        times, places = torch.cat([t, t, t.repeat_interleave(num_negatives)]), None
        if self.grain == "batch":
            nodes, places = torch.unique(nodes, return_inverse=True)
            times = times[: len(nodes)]
        with self.clock.stage("sample"):
            sample = self.sampler.sample(nodes, times, layout=self._layout)
        with self.clock.stage("fetch"):
            inputs = Inputs(None, None) if features is None else attach(sample, features)
        with self.clock.stage("train"):
            embedded = self.model(sample, inputs)
            if places is not None:
                embedded = embedded[places.to(embedded.device)]
            src, dst, others = embedded.split([num_events, num_events, negatives.numel()])
            others = others.unflatten(0, (num_events, num_negatives))
            return self.head(src, dst), self.head(src[:, None], others)

    def evaluate(
        self, events: Events, negatives: Negatives, features: Features | FeatureCache | None
    ) -> Scores:
        """Scores events against negatives, batch by batch; restores training modes and memory.

        Features are read from the store itself, since reads through a cache would change it.
        """
        found = []
        with self._evaluating():
            for batch in self._batches(len(events)):
                found.append(self.score(events[batch], negatives[batch], _uncached(features)))
                if self.memory is not None:
                    self.memory.commit(events[batch])
        pos, neg = (torch.cat(part).cpu() for part in zip(*found, strict=True))
        return Scores(
            average_precision(pos, neg[:, 0]),
            auc(pos, neg[:, 0]),
            mrr(pos, neg),
        )

    def predict(
        self, events: Events, features: Features | FeatureCache | None
    ) -> Float[Tensor, " num_events"]:
        """Logits of links that may or may not come about; nothing is remembered.

        Args:
            events: links by the time as of which they are asked about.
            features: source of feature rows; None for none.
        """
        none, found = torch.empty(len(events), 0, dtype=torch.int64), [torch.empty(0)]
        with self._evaluating():
            for batch in self._batches(len(events)):
                logits, _ = self.score(events[batch], none[batch], _uncached(features))
                found.append(logits.cpu())
        return torch.cat(found)

    def train(
        self,
        events: Events,
        negatives: Negatives,
        features: Features | FeatureCache | None,
        optimizer: torch.optim.Optimizer,
        *,
        remember: bool,
    ) -> Float[Tensor, ""]:
        """One optimizer step per batch on binary cross entropy, mean over events plus negatives'.

        Args:
            events: sorted by time.
            negatives: other destinations of each event.
            features: source of feature rows; None for none.
            optimizer: optimizer of model and head.
            remember: commit events to the model's memory.

        Returns:
            The loss, summed over events.
        """
        self.model.train(), self.head.train()
        total = torch.zeros((), device=self.clock.device, dtype=torch.float64)
        for batch in self._batches(len(events)):
            pos, neg = self.score(events[batch], negatives[batch], features)
            with self.clock.stage("train"):
                # -log(sigmoid(x)) is softplus(-x), and -log(1 - sigmoid(x)) is softplus(x).
                loss = F.softplus(-pos).mean() + F.softplus(neg).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(pos)
                if remember and self.memory is not None:
                    self.memory.commit(events[batch])
        return total

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; modes and memory are restored at the end."""
        memory = None if self.memory is None else self.memory.state()
        modes = [
            (part, part.training) for whole in (self.model, self.head) for part in whole.modules()
        ]
        try:
            self.model.eval(), self.head.eval()
            with torch.no_grad():
                yield
        finally:
            for part, was_training in modes:
                part.training = was_training
            if self.memory is not None and memory is not None:
                self.memory.load_state(memory)

    def _batches(self, num_events: int) -> Iterator[slice]:
        for start in range(0, num_events, self.batch_size):
            yield slice(start, start + self.batch_size)


def _uncached(features: Features | FeatureCache | None) -> Features | None:
    return features.store if isinstance(features, FeatureCache) else features
