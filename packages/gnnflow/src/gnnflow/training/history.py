"""What a run keeps of past events: graph, rows of features, negatives, and replay."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnflow.data.negatives import Negatives
from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import Features, FeatureStore
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.training.replay import ReplayPolicy
from gnnflow.training.rounds import StageClock, parse_span
from shared.data.events import Events
from shared.errors import DataError

__all__ = ["StreamHistory", "select_new_rows"]


class StreamHistory:
    """Inserts events in order, and expires those outside a window.

    Args:
        graph: graph that events are inserted into.
        features: a store, or a cache of one; rows that it lacks are appended.
        replay: policy that draws past events.
        negatives: kind of negatives in evaluations; `training_negatives` are random.
        window: as for `ContinualTrainer`.
        seed: seed of negatives.
        clock: counts the stages "insert" and "sample".
    """

    def __init__(
        self,
        graph: TemporalGraph,
        features: Features | FeatureCache | None,
        replay: ReplayPolicy,
        *,
        negatives: str,
        window: float | str | None,
        seed: int,
        clock: StageClock,
    ) -> None:
        self.graph, self.features, self.replay, self.clock = graph, features, replay, clock
        self.negatives = Negatives(negatives, seed=seed)
        is_same = self.negatives.kind == "random"
        self.training_negatives = self.negatives if is_same else Negatives(seed=seed)
        self._window = None if window is None else parse_span("window", window)

    def bound(self, new: Events) -> float | None:
        """Edges earlier than this expire before an increment; None without a window."""
        return None if self._window is None else new.t[0].item() - self._window

    def insert(self, new: Events, *, since: float | None = None) -> None:
        """Inserts the next events.

        Args:
            new: sorted by time, none earlier than those inserted before.
            since: edges earlier than this expire, or never enter the graph.

        Raises:
            DataError: graph or features refuse an event.
        """
        with self.clock.stage("insert"):
            if since is not None:
                self.graph.expire(before=since)
            store, rows = self._new_rows(new)
            kept = new if since is None else new[new.t >= since]
            self.graph.add_edges(kept.src, kept.dst, kept.t, kept.eid)
            if store is not None:
                store.append("edge", rows)
        with self.clock.stage("sample"):
            self.negatives.observe(new)
            if self.training_negatives is not self.negatives:
                self.training_negatives.observe(new)
            self.replay.observe(new)

    def draw_replayed(self, events: Events, start: int, index: int) -> Events:
        """Past events to train on with the increment that begins at `start`, by time.

        Args:
            events: the whole stream, inserted up to the increment's end.
            start: position of the increment's first event.
            index: number of the round; each draws differently.
        """
        with self.clock.stage("sample"):
            bound = self.bound(events[start : start + 1])
            oldest = 0 if bound is None else int((events.t[:start] < bound).sum())
            return events[self.replay.draw(oldest, start, index)]

    def _new_rows(self, new: Events) -> tuple[FeatureStore | None, Tensor]:
        """The store and the rows to append to it; None if it has none or lacks none."""
        none = torch.empty(0, 0)
        store = self.features
        if isinstance(store, FeatureCache):
            store = store.store
        if store is None or not store.dim("edge") or not len(new):
            return None, none
        rows = select_new_rows(store.num_rows("edge"), new)
        if rows is None:
            return None, none
        if not isinstance(store, FeatureStore):
            raise DataError(
                f"features: expected a row for each event up to id {int(new.eid.max())}, there are "
                f"{store.num_rows('edge')}; give a store with all of them"
            )
        return store, rows


def select_new_rows(num_rows: int, new: Events) -> Tensor | None:
    """Features of the events whose ids follow the first `num_rows`; None if there are none.

    Raises:
        DataError: events have no features, or their ids leave rows out.
    """
    if int(new.eid.max()) < num_rows:
        return None
    later = new if int(new.eid[0]) >= num_rows else new[new.eid >= num_rows]
    is_next = torch.equal(later.eid, torch.arange(num_rows, num_rows + len(later)))
    if later.features is None or not is_next:
        raise DataError(
            f"features: expected a row of edge features for each event up to id "
            f"{int(new.eid.max())}, there are {num_rows}; give a store with all of them "
            f"(`events.rows_by_id()`), or events that have features, and ids in the order of the "
            f"stream from {num_rows} on"
        )
    return later.features
