"""A cache of feature rows on the device that uses them, in front of a slower store.

After GNNFlow's caches (arXiv 2311.17410): one for nodes and one for edges, each for a fraction of
the rows. *Reuse*: nothing is dropped between rounds, so that hubs stay. *Restoration*: a round
visits old edges again while the cache is full of the newest, so that `restore` prefetches those it
visits first, as many as past restorations justify. The maps are in host memory, where missing rows
come from, and sized by the rows held; `gnnflow.features.slot_map` lists the departures.
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

# Policies that are not offered, and which to use instead.
_REPLACED = {"fifo": "lru", "static": "keep"}


class FeatureCache:
    """Caches a fraction of a store's rows on a device; returned rows always equal the store's.

    Rows of the store must not change; the cache grows as rows are appended. A batch is looked up as
    a whole, each id counted once, and then its misses enter by the policy. On CUDA devices make all
    calls on one stream. Calls from several threads are serialised by kind.

    Args:
        store: a `FeatureStore`, or an object with its `dim`, `num_rows` and `gather`, with rows on
            the CPU. Each `fetch` and `restore` calls `gather` once, with no ids if all hit, so that
            a store whose `gather` is a collective works too.
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
                f"expected an available device, got {str(device)!r} ({reason}); use 'cpu'"
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

        Held rows among them are marked as just used, in reverse order, so that those visited last
        are evicted first. The others are loaded and enter by the policy. A prefetched row saves at
        most the one miss that would have loaded it; it is wasted if it is never requested, or if it
        displaces a row that is. So the number loaded is limited to 5/4 of what the last restoration
        saved: its rows that were requested, less the estimated hits of as many rows that were next
        to leave. If it saved at least four fifths of its rows, the limit doubles. The first
        restoration may fill all slots, and each may load 16 rows, to measure whether it pays.

        Args:
            eids: int64 [n], in visiting order; distinct ids beyond the number of slots are ignored.

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
            # The store refuses them too; a collective `gather` then informs the waiting ranks.
            self.store.gather(kind, ids)
            raise

    def _part(self, kind: Kind) -> RowCache:
        if kind not in self._parts:
            raise ConfigError(f"expected kind 'node' or 'edge', got {kind!r}")
        return self._parts[kind]


def _host(ids: Tensor) -> np.ndarray:
    return ids.detach().cpu().contiguous().numpy()
