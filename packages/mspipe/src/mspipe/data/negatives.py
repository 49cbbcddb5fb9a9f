"""Negatives: random destinations other than an event's own, reproducible by the event's id."""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from mspipe.data.events import Events
from shared.data.negatives import Kind, draw_words, first_not_before
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key

__all__ = ["Negatives"]


class Negatives:
    """Draws destinations for events, never an event's own.

    After "Towards Better Evaluation for Dynamic Link Prediction" (arXiv 2207.10128): `random`
    negatives are any destinations of the stream; `historical` ones are destinations that the source
    met before the event; `inductive` ones are those of them that it first met at `since` or later.
    If a source has none, a random one is drawn. A draw depends only on the seed, the event's id and
    the number of the draw.

    Args:
        events: the whole stream, from which negatives are drawn.
        kind: "random", "historical" or "inductive".
        since: for "inductive", the time at which training ends.

    Raises:
        ConfigError: the kind is none of these, or `inductive` has no `since`.
    """

    def __init__(self, events: Events, kind: Kind = "random", since: float | None = None) -> None:
        if kind not in get_args(Kind):
            raise ConfigError(
                f"negatives: expected one of {', '.join(get_args(Kind))}, got {kind!r}"
            )
        if kind == "inductive" and since is None:
            raise ConfigError(
                "negatives: inductive ones need since=, the time at which training ends"
            )
        self.kind = kind
        self._pool = torch.unique(events.dst)
        src, dst, t = (part.numpy() for part in (events.src, events.dst, events.t))
        # The first event of every pair: by source, then by time.
        self._num_nodes = events.num_nodes
        _, first = np.unique(src * self._num_nodes + dst, return_index=True)
        first = first[np.lexsort((first, src[first]))]
        self._src, self._dst, self._t = src[first], dst[first], t[first]
        self._starts = np.searchsorted(self._src, np.arange(self._num_nodes + 1))
        order = np.lexsort((self._dst, self._src))
        self._pairs, self._place = (self._src * self._num_nodes + self._dst)[order], order
        self._since = since

    def draw(
        self, events: Events, num_negatives: int = 1, seed: int = 0
    ) -> Int64[Tensor, "num_events num_negatives"]:
        """Negatives of each event, which do not depend on how events are batched.

        Raises:
            ConfigError: `num_negatives` is negative.
            DataError: a source is not a node of the stream, or there is no other destination.
        """
        if num_negatives < 0:
            raise ConfigError(f"expected num_negatives of 0 or more, got {num_negatives}")
        count = len(events)
        if not count or not num_negatives:
            return torch.empty(count, num_negatives, dtype=torch.int64)
        if int(events.src.max()) >= self._num_nodes:
            raise DataError(
                f"negatives: expected nodes below {self._num_nodes}, as the stream has them"
            )
        words = draw_words(events.eid, num_negatives, stream_key(seed))
        # 31 bits of each word: modulo up to 2^20 the bias is below one in two thousand.
        bits = (words[..., :2] & 0x7FFFFFFF).numpy()
        found = self._random(events, bits[..., 0])
        if self.kind == "random":
            return torch.from_numpy(found)
        low, high, own = self._range(events)
        num_candidates = high - low - ((own >= low) & (own < high))
        at = low[:, None] + bits[..., 1] % np.maximum(num_candidates, 1)[:, None]
        # The last candidate takes the place of the excluded one, the event's own.
        at = np.where(at == own[:, None], high[:, None] - 1, at)
        is_there = num_candidates[:, None] > 0
        met = self._dst[np.where(is_there, at, 0)]
        return torch.from_numpy(np.where(is_there, met, found))

    def _random(self, events: Events, bits: np.ndarray) -> np.ndarray:
        pool = self._pool.numpy()
        place = np.searchsorted(pool, events.dst.numpy())
        is_in = (place < len(pool)) & (pool[np.minimum(place, len(pool) - 1)] == events.dst.numpy())
        num_candidates = len(pool) - is_in
        if (num_candidates < 1).any():
            raise DataError("negatives: expected at least two different destinations in the stream")
        at = bits % num_candidates[:, None]
        return pool[at + (is_in[:, None] & (at >= place[:, None]))]

    def _range(self, events: Events) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each event its candidates' start and end in the list of pairs, and its own pair."""
        src, dst, t = (part.numpy() for part in (events.src, events.dst, events.t))
        begin, end = self._starts[src], self._starts[src + 1]
        high = first_not_before(self._t, begin, end, t)
        low = begin
        if self.kind == "inductive":
            low = first_not_before(self._t, begin, end, np.full(len(src), self._since))
        key = src * self._num_nodes + dst
        place = np.minimum(np.searchsorted(self._pairs, key), len(self._pairs) - 1)
        own = np.where(self._pairs[place] == key, self._place[place], -1)
        return low, np.maximum(high, low), own
