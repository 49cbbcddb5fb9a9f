"""Negative destinations of events, which models learn to distinguish from the real ones.

Random, historical and inductive negatives after Poursafaei et al., "Towards Better Evaluation for
Dynamic Link Prediction" (arXiv 2207.10128), drawn per source as in the Temporal Graph Benchmark.
Every draw respects time: a candidate was met strictly before the event, and is not met by the same
source at the event's own time. A draw depends on the seed, the stream, the event's id and the number
of the draw alone, so that neither cuts into batches nor later events change it.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shared.data.events import Events
from shared.data.negatives import Kind, draw_words, first_not_before
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key

__all__ = ["Negatives"]

_BITS = 31


class Negatives:
    """Draws negative destinations from the past of a stream.

    It keeps one entry for each pair of nodes that has met and 16 bytes an event; observing new
    events takes time in the number of pairs.

    Args:
        kind: "random": any destination there was; "historical": one that the source has met;
            "inductive": one that the source has met first at `since` or after. Where an event has
            no such candidate, it gets a random one.
        since: when training ended for "inductive"; may be set later.
        seed: of the draws.

    Raises:
        ConfigError: another kind.
    """

    def __init__(self, kind: str = "random", *, since: float | None = None, seed: int = 0) -> None:
        if kind not in get_args(Kind):
            raise ConfigError(
                f"negatives: expected one of {', '.join(get_args(Kind))}, got {kind!r}"
            )
        self.kind = kind
        self.since = since
        self.seed = seed
        self._anywhere = _FirstMet()
        self._of_source = _FirstMet()
        self._simultaneous = _Simultaneous()

    def observe(self, events: Events) -> None:
        """Adds events to the past.

        Raises:
            DataError: they are not in order of time after those there are, or have ids from 2^31.
        """
        if not len(events):
            return
        src, dst, t = (getattr(events, name).numpy() for name in ("src", "dst", "t"))
        if events.num_nodes > 1 << _BITS:
            raise DataError(f"negatives: expected ids below 2^{_BITS}, got {events.num_nodes - 1}")
        newest = self._simultaneous.newest
        if not events.is_sorted or (newest is not None and t[0] < newest):
            raise DataError(
                f"negatives: expected events in order of time, none before {newest}; sort them with "
                "events.sorted() and observe all of them in order"
            )
        self._simultaneous.add(src, dst, t)
        self._anywhere.add(np.zeros_like(src), dst, t)
        if self.kind != "random":
            self._of_source.add(src, dst, t)

    def draw(
        self, events: Events, num: int = 1, *, stream: int = 0
    ) -> Int64[Tensor, "num_events {num}"]:
        """Independent draws for each event; one destination may come several times.

        Args:
            events: in any order, among those observed or later than them.
            num: draws an event.
            stream: another one gives other draws, for another epoch for instance.

        Raises:
            ConfigError: `num` is negative, or "inductive" negatives know no `since`.
            DataError: no other destination than an event's own was seen.
        """
        if num < 0:
            raise ConfigError(f"expected 0 or more negatives an event, got {num}")
        if self.kind == "inductive" and self.since is None:
            raise ConfigError("inductive negatives: expected since=, the time when training ended")
        words = draw_words(events.eid, num, stream_key(self.seed, stream)).permute(2, 0, 1).numpy()
        src, dst, t = (getattr(events, name).numpy() for name in ("src", "dst", "t"))
        owner, met = self._simultaneous.find(src, dst, t)
        everywhere = np.zeros_like(src)
        found = np.full((len(events), num), -1)
        if self.kind != "random":
            since = self.since if self.kind == "inductive" else None
            found = self._of_source.pick(src, t, since, owner, met, words[0])
        # At the beginning of a stream nothing was met before; then any destination will do.
        for until in (t, None):
            lacking = found[:, :1] < 0
            if num and lacking.any():
                random = self._anywhere.pick(everywhere, until, None, owner, met, words[1])
                found = np.where(lacking, random, found)
        if (found < 0).any():
            row = int(np.argwhere(found < 0)[0][0])
            raise DataError(
                f"negatives of event {row} ({src[row]} -> {dst[row]}): expected another destination "
                f"among those seen, there is none; observe more events first"
            )
        return torch.from_numpy(found)


class _FirstMet:
    """First meetings: a row per source, with its destinations in the order of first meetings."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)  # source and destination, ascending
        self._rank = np.empty(0, np.int64)  # of a key within its row; never changes
        self._first_t = np.empty(0)
        self._by_rank = np.empty(0, np.int64)  # row by row
        self._t_by_rank = np.empty(0)

    def add(self, src: np.ndarray, dst: np.ndarray, t: np.ndarray) -> None:
        keys, first = np.unique((src << _BITS) | dst, return_index=True)
        known = self._ranks(keys)
        keys, first = keys[known < 0], first[known < 0]
        rows = keys >> _BITS
        low, high = self._rows(rows)
        order = np.lexsort((first, rows))
        rank = np.empty_like(keys)
        starts = np.searchsorted(rows, rows)
        rank[order] = np.arange(len(keys)) - starts + (high - low)
        at = np.searchsorted(self._keys, keys)
        self._keys = np.insert(self._keys, at, keys)
        self._rank = np.insert(self._rank, at, rank)
        # Of one type with the stream's times, so that no two of them are merged.
        self._first_t = np.insert(self._first_t.astype(t.dtype), at, t[first])
        place = self._rows(self._keys >> _BITS)[0] + self._rank
        self._by_rank, self._t_by_rank = np.empty_like(self._keys), np.empty_like(self._first_t)
        self._by_rank[place] = self._keys & ((1 << _BITS) - 1)
        self._t_by_rank[place] = self._first_t

    def pick(
        self,
        rows: np.ndarray,
        until: np.ndarray | None,
        since: float | None,
        owner: np.ndarray,
        excluded: np.ndarray,
        words: np.ndarray,
    ) -> np.ndarray:
        """A destination of its row for each word, or -1 where there is none.

        Candidates were first met in [since, until); `excluded[i]` is none for query `owner[i]`.
        """
        start, end = self._rows(rows)
        times = self._t_by_rank
        last = end if until is None else first_not_before(times, start, end, until)
        low = start
        if since is not None:
            low = first_not_before(times, start, end, np.full(len(rows), since))
        rank = self._ranks((rows[owner] << _BITS) | excluded)
        place = np.where(rank < 0, -1, start[owner] + rank)
        counts = (place >= low[owner]) & (place < last[owner])
        pairs = np.unique(np.stack([owner[counts], place[counts]], 1), axis=0)
        num_excluded = np.bincount(pairs[:, 0], minlength=len(rows))
        num = np.maximum(last - low - num_excluded, 0)
        # A word times the number of candidates over 2^32: even to 2^-32 of it.
        chosen = low[:, None] + ((words * num[:, None]) >> 32)
        # The n-th candidate that is not excluded: past each excluded one at or before it, in order.
        first = np.cumsum(num_excluded) - num_excluded
        for nth in range(int(num_excluded.max(initial=0))):
            have = np.flatnonzero(num_excluded > nth)
            at = pairs[first[have] + nth, 1]
            chosen[have] += chosen[have] >= at[:, None]
        found = np.full_like(chosen, -1)
        some = num > 0
        found[some] = self._by_rank[chosen[some]]
        return found

    def _rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.searchsorted(self._keys, rows << _BITS)
        return low, np.searchsorted(self._keys, (rows + 1) << _BITS)

    def _ranks(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._keys):
            return np.full(len(keys), -1)
        near = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[near] == keys, self._rank[near], -1)


class _Simultaneous:
    """Destinations of a source at one time, over chunks of the stream as they were observed."""

    def __init__(self) -> None:
        self._first: list[int | float] = []
        self._last: list[int | float] = []
        self._chunks: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []

    @property
    def newest(self) -> int | float | None:
        return self._last[-1] if self._last else None

    def add(self, src: np.ndarray, dst: np.ndarray, t: np.ndarray) -> None:
        times, rank = np.unique(t, return_inverse=True)
        num_rows = int(src.max()) + 1
        keys = rank * num_rows + src
        order = np.argsort(keys, kind="stable")
        self._chunks.append((times, num_rows, keys[order], dst[order]))
        self._first.append(t[0].item())
        self._last.append(t[-1].item())

    def find(
        self, src: np.ndarray, dst: np.ndarray, t: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each event, which destinations its source has at its time, its own among them.

        Returns:
            Pairs of the event's place and a destination.
        """
        owners, found = [np.arange(len(src))], [dst]
        low, high = np.searchsorted(self._last, t), np.searchsorted(self._first, t, "right")
        for at in range(int(low.min(initial=len(self._chunks))), int(high.max(initial=0))):
            times, num_rows, keys, destinations = self._chunks[at]
            mine = np.flatnonzero((low <= at) & (at < high) & (src < num_rows))
            rank = np.searchsorted(times, t[mine])
            there = times[np.minimum(rank, len(times) - 1)] == t[mine]
            mine, key = mine[there], rank[there] * num_rows + src[mine[there]]
            begin, end = np.searchsorted(keys, key), np.searchsorted(keys, key, "right")
            size = end - begin
            owners.append(np.repeat(mine, size))
            steps = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            found.append(destinations[np.repeat(begin, size) + steps])
        return np.concatenate(owners), np.concatenate(found)
