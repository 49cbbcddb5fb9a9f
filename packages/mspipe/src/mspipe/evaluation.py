"""Link prediction metrics of a model, and EdgeBank as a baseline.

Scores of all events are pooled: the mean of the batches' average precisions, which MSPipe's and
TGL's programs print, depends on how the stream is cut. Ranks are as in TGB (arXiv 2307.01026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.pipeline.pipeline import Pipeline
from shared.data import metrics as ranking
from shared.data.negatives import Kind
from shared.errors import ConfigError, DataError

__all__ = ["EdgeBank", "evaluate", "score_links"]

_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "ap": lambda pos, neg: ranking.average_precision(pos, neg[:, 0]),
    "auc": lambda pos, neg: ranking.auc(pos, neg[:, 0]),
    "mrr": ranking.mrr,
    "hits@1": lambda pos, neg: ranking.hits(pos, neg, 1),
    "hits@3": lambda pos, neg: ranking.hits(pos, neg, 3),
    "hits@10": lambda pos, neg: ranking.hits(pos, neg, 10),
}
_USUAL = ("ap", "auc", "mrr")


def evaluate(
    pipe: Pipeline,
    events: Events,
    *,
    history: Events | None = None,
    negatives: Kind | Negatives = "random",
    num_negatives: int = 1,
    batch_size: int = 600,
    seed: int = 0,
    metrics: Sequence[str] = _USUAL,
    commits: bool = False,
) -> dict[str, float]:
    """Scores events in order of time, each batch before the memory is updated with it.

    AP and AUC compare events with the first negative of each; MRR and hits rank an event among its
    own negatives. The memory must hold all events before the first one.

    Args:
        pipe: pipeline with the model and its memory.
        events: events by time that directly follow those in the memory.
        history: earlier events; negatives are drawn from these and from `events`.
        negatives: kind of negatives ("inductive": pairs that first met at the first of `events` or
            later), or the source to draw them from.
        num_negatives: negatives per event.
        batch_size: number of events scored with the same state of the memory.
        seed: seed of the draws.
        metrics: names among ap, auc, mrr, hits@1, hits@3 and hits@10.
        commits: keep the memory's updates, so that the events after `events` can be evaluated next;
            otherwise all rows are restored afterwards.

    Returns:
        The metrics by name, from 0 to 1.

    Raises:
        ConfigError: a setting is out of range, or a run that uses the memory is open.
        DataError: there are no events, no negatives for them, or a score is NaN.
        CommError: the memory's server does not answer.
    """
    negatives = _checked(events, history, negatives, num_negatives, metrics)
    # Refuse an open run before `preserved` starts: its writes would be undone with ours.
    with pipe.memory.lease("an evaluation"):
        pass
    with nullcontext() if commits else pipe.memory.preserved():
        cut = batches(events, batch_size, negatives, num_negatives=num_negatives, seed=seed)
        return _measured(((out.pos, out.neg) for out in pipe.score(cut)), metrics)


def score_links(
    pipe: Pipeline,
    src: Int64[Tensor, " num_links"],
    dst: Int64[Tensor, " num_links"],
    t: Shaped[Tensor, " num_links"],
    *,
    batch_size: int = 600,
) -> Float[Tensor, " num_links"]:
    """Logits of links that may or may not come about, from the memory as it is; changes nothing.

    Args:
        pipe: pipeline with the model and its memory.
        src: nodes below the memory's number of nodes.
        dst: nodes below the memory's number of nodes.
        t: times as of which links are asked about, none before the memory's last event.
        batch_size: number of links scored at a time; does not change the result.

    Returns:
        On the CPU; `sigmoid` makes a probability of it, against a random destination.

    Raises:
        ConfigError: a run that uses the memory is open.
        DataError: a node is beyond the memory, or a time is NaN or infinite.
        CommError: the memory's server does not answer.
    """
    model, memory = pipe.model, pipe.memory
    device, was_training = next(model.parameters()).device, model.training
    found = [torch.empty(0)]
    with memory.lease("a prediction"), torch.no_grad():
        model.eval()
        try:
            for at in range(0, len(src), batch_size):
                ends = torch.cat([column[at : at + batch_size] for column in (src, dst)])
                sampled = pipe.sampler.sample(ends, t[at : at + batch_size].repeat(2))
                state = memory.unpack(memory.read_rows(sampled.nodes).to(device))
                edges = torch.empty(len(sampled.eids), 0)
                if pipe.features is not None:
                    edges = pipe.features.index_select(0, sampled.eids)
                embedded = model.embed(sampled, model.update(state), edges.to(device))
                found.append(model.head(*embedded.chunk(2)).cpu())
        finally:
            model.train(was_training)
    return torch.cat(found)


class EdgeBank:
    """Scores 1 for a pair seen before and 0 for others, after Poursafaei et al. (arXiv 2207.10128).

    A baseline for streams in which pairs meet repeatedly.

    Args:
        window: how long a pair is remembered after it last met, in the events' unit of time; None
            remembers it forever.

    Raises:
        ConfigError: the window is negative.
    """

    def __init__(self, window: float | None = None) -> None:
        if window is not None and not window >= 0:
            raise ConfigError(f"EdgeBank: expected a window of 0 or more, or None, got {window}")
        self.window = window
        # Unique pairs in ascending order, and the time at which each last met.
        self._pairs, self._last = np.empty(0, np.int64), np.empty(0, np.int64)

    def remember(self, events: Events) -> None:
        """Adds the directed pairs of events, which are in order of time.

        Raises:
            DataError: a node is 2^31 or more.
        """
        pairs = np.concatenate([self._pairs, _pairs(events.src, events.dst)])
        last = np.concatenate([self._last, events.t.numpy()])
        self._pairs, newest = np.unique(pairs[::-1], return_index=True)
        self._last = last[::-1][newest]

    def score(
        self,
        src: Int64[Tensor, " *n"],
        dst: Int64[Tensor, " *n"],
        t: Shaped[Tensor, " *n"],
    ) -> Bool[Tensor, " *n"]:
        """Whether each pair is remembered at its time.

        Raises:
            DataError: a node is 2^31 or more.
        """
        pairs = _pairs(src, dst)
        if not len(self._pairs):
            return torch.zeros(pairs.shape, dtype=torch.bool)
        place = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        is_known = self._pairs[place] == pairs
        if self.window is not None:
            is_known &= self._last[place] >= t.numpy() - self.window
        return torch.from_numpy(is_known)

    def evaluate(
        self,
        history: Events | None,
        events: Events,
        *,
        negatives: Kind | Negatives = "random",
        num_negatives: int = 1,
        batch_size: int = 600,
        seed: int = 0,
        metrics: Sequence[str] = _USUAL,
    ) -> dict[str, float]:
        """Scores events as the function `evaluate` does with a model.

        It starts from `history` alone, not from pairs remembered here. Each batch is scored, then
        remembered. The same settings give the same negatives as the function `evaluate`.

        Args:
            history: events before `events`; None for none.
            events: events by time.
            negatives: kind of negatives, or the source to draw them from.
            num_negatives: negatives per event.
            batch_size: number of events scored before they are remembered.
            seed: seed of the draws.
            metrics: names among ap, auc, mrr, hits@1, hits@3 and hits@10.

        Returns:
            The metrics by name, from 0 to 1.

        Raises:
            ConfigError: a setting is out of range.
            DataError: there are no events, no negatives for them, or history ends after the first
                event.
        """
        negatives = _checked(events, history, negatives, num_negatives, metrics)
        if history and history.t[-1] > events.t[0]:
            raise DataError(
                f"EdgeBank: expected history that ends by the first event at {events.t[0].item()}, "
                f"got one until {history.t[-1].item()}; give earlier events, such as stream[:n]"
            )
        cut = batches(events, batch_size, negatives, num_negatives=num_negatives, seed=seed)
        bank = EdgeBank(self.window)
        if history:
            bank.remember(history)

        def scores() -> Iterable[tuple[Tensor, Tensor]]:
            for batch in cut:
                part, others = batch.events, batch.negatives
                src, t = (values[:, None].expand(others.shape) for values in (part.src, part.t))
                yield bank.score(part.src, part.dst, part.t), bank.score(src, others, t)
                bank.remember(part)

        return _measured(scores(), metrics)


def _checked(
    events: Events,
    history: Events | None,
    negatives: Kind | Negatives,
    num_negatives: int,
    metrics: Sequence[str],
) -> Negatives:
    """The source of negatives, after checks of the other arguments."""
    if isinstance(metrics, str) or not set(metrics) <= set(_METRICS):
        raise ConfigError(f"metrics: expected some of {', '.join(_METRICS)}, got {metrics!r}")
    if num_negatives < 1:
        raise ConfigError(f"evaluate: expected num_negatives of at least 1, got {num_negatives}")
    if not len(events):
        raise DataError("evaluate: expected at least one event, got none")
    if isinstance(negatives, Negatives):
        return negatives
    parts = (history, events) if history else (events,)
    src, dst, t = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("src", "dst", "t")
    )
    return Negatives(Events(src, dst, t, sort=True), negatives, since=events.t[0].item())


def _measured(scores: Iterable[tuple[Tensor, Tensor]], metrics: Sequence[str]) -> dict[str, float]:
    pos, neg = zip(*((pos.cpu(), neg.cpu()) for pos, neg in scores), strict=True)
    return {name: _METRICS[name](torch.cat(pos), torch.cat(neg)) for name in metrics}


def _pairs(src: Tensor, dst: Tensor) -> np.ndarray:
    if src.numel() and int(max(src.max(), dst.max())) >= 1 << 31:
        raise DataError(
            f"EdgeBank: expected nodes below 2^31, got {int(max(src.max(), dst.max()))}"
        )
    return ((src << 31) | dst).numpy()
