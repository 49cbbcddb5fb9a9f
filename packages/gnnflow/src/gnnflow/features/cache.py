"""Rows of features held where they are used, in front of a store that is slower to reach.

The practical form of GNNFlow's caches (arXiv 2311.17410): one for nodes and one for edges, each a
fraction of the rows there are. *Reuse*: nothing is dropped between rounds, so that hubs stay.
*Restoration*: a round visits old edges again while the cache is full of the newest, so that
`restore` prefetches those it will visit first, as far as that has paid. The maps lie on the host, where
rows that miss come from, and are sized by what is held; `gnnflow.features.slot_map` has the departures.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from gnnflow.features.policies import CACHE_POLICIES
from gnnflow.features.row_cache import CacheStats, RowCache
from gnnflow.features.store import Features, Kind, check_ids
from shared.errors import ConfigError, DataError

__all__ = ["CacheStats", "FeatureCache"]

# Names that users may still give, and what serves them better.
_REPLACED = {"fifo": "lru", "static": "keep"}


class FeatureCache:
    """A fraction of a store's rows on a device; what it returns is always equal to the store's.

    Rows must not change in the store once it has them; rows appended make the cache grow with them.
    A batch hits or misses as a whole, each id once, and then its misses enter by the policy. On CUDA
    devices all calls belong on one stream. Calls from several threads wait for one another by kind.

    Args:
        store: a `FeatureStore`, or whatever has its `dim`, `num_rows` and `gather`, with rows on the
            CPU. Each `fetch` and `restore` gathers once, of no ids where all hit, so that a store
            whose `gather` is a collective may stand behind.
        node: fraction of the node rows to hold, in [0, 1].
        edge: fraction of the edge rows to hold, in [0, 1].
        policy: a name of `gnnflow.features.policies`: which row leaves when another enters.
        device: where rows are held and returned.

    Raises:
        ConfigError: a fraction is out of range, no policy has that name, or there is no such device.
    """

    def __init__(
        self,
        store: Features,
        node: float = 0.1,
        edge: float = 0.05,
        policy: str = "keep",
        device: torch.device | str = "cpu",
    ) -> None:
        fractions: dict[Kind, float] = {"node": node, "edge": edge}
        for kind, fraction in fractions.items():
            if not 0 <= fraction <= 1:
                raise ConfigError(f"expected {kind} as a fraction in [0, 1], got {fraction}")
        if policy in _REPLACED:
            raise ConfigError(
                f"cache policy: expected one of {', '.join(CACHE_POLICIES)}, got {policy!r}; use "
                f"{_REPLACED[policy]!r}, which finds more of the rows asked for"
            )
        CACHE_POLICIES.check(policy)
        try:
            self.device = torch.empty(0, device=device).device
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"expected a device there is, got {str(device)!r} ({reason}); use 'cpu'"
            ) from error
        self.store, self.policy = store, policy
        self._parts: dict[Kind, RowCache] = {
            kind: RowCache(store, kind, fraction, policy, self.device)
            for kind, fraction in fractions.items()
        }

    def dim(self, kind: Kind) -> int:
        """Columns of a kind; 0 where it has no features."""
        return self.store.dim(kind)

    def fetch(self, kind: Kind, ids: Int64[Tensor, " n"]) -> Float32[Tensor, "n dim"]:
        """Rows of ids, in their order, repeats included, on the cache's device.

        Args:
            kind: "node" or "edge".
            ids: int64 [n], each in [0, num_rows), on any device.

        Raises:
            ConfigError: no such kind.
            DataError: the kind has no features, or an id has no row; nothing was counted then.
            OSError: a remote store failed; nothing entered then.
        """
        part = self._part(kind)
        self._check(kind, ids)
        with part.lock:
            return part.fetch(_host(ids))

    def restore(self, eids: Int64[Tensor, " n"]) -> None:
        """Prefetches a round's edges in visiting order; to be called at its start.

        Held rows among them count as used just now, in reverse, so that those to be visited last
        give way first. The others are loaded and enter by the policy. A row loaded ahead saves the
        miss that would have loaded it, and no more: restoring moves as many rows, only earlier and
        at once, or more where nobody asks for a row, or where others leave early while it waits. So
        no more are loaded than a quarter over what the last restoration has saved so far: its rows
        that were asked for, less the hits that as many of the rows had that would leave next. After
        one that saved four fifths of its rows, twice as many may be loaded. The first may load as
        many as there are slots, and each may load 16, since nothing else tells whether it pays.

        Args:
            eids: int64 [n], in the order of the visit; of different ones those beyond the number of
                slots are ignored.

        Raises:
            DataError: there are no edge features, or an id has no row.
            OSError: a remote store failed; the cache is empty then.
        """
        self._check("edge", eids)
        part = self._part("edge")
        with part.lock:
            ids, first = np.unique(_host(eids), return_index=True)
            part.restore(ids[first.argsort()])

    def held(self, kind: Kind) -> Int64[Tensor, " held"]:
        """The ids whose rows are held, in rising order."""
        return torch.from_numpy(np.sort(self._part(kind).map.ids()))

    def clear(self) -> None:
        """Drops all rows; what was counted stays."""
        for part in self._parts.values():
            with part.lock:
                part.map.clear()

    def stats(self) -> dict[Kind, CacheStats]:
        """Counts and sizes of each kind that has features."""
        found: dict[Kind, CacheStats] = {}
        for kind, part in self._parts.items():
            if self.store.dim(kind):
                with part.lock:
                    found[kind] = part.stats()
        return found

    def reset_stats(self) -> None:
        """Counts hits, misses and bytes from zero again."""
        for part in self._parts.values():
            with part.lock:
                part.num_hits = part.num_misses = part.bytes_from_store = 0

    def _check(self, kind: Kind, ids: Tensor) -> None:
        try:
            check_ids(self.store, kind, ids)
        except DataError:
            # The store refuses them too, and tells the ranks that wait for this one.
            self.store.gather(kind, ids)
            raise

    def _part(self, kind: Kind) -> RowCache:
        if kind not in self._parts:
            raise ConfigError(f"expected kind 'node' or 'edge', got {kind!r}")
        return self._parts[kind]


def _host(ids: Tensor) -> np.ndarray:
    return ids.detach().cpu().contiguous().numpy()
