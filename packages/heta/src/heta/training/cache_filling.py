"""Fills the caches of remote features by the rows that batches ask for, and what a miss costs.

Learnable rows are left out: another rank's copy would have to be sent again after each step in which
anybody touched the row, at least as often as it is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from heta.graph.part import Part
from heta.rows.cache import Cache, RemoteRowCache, fill_cache
from heta.rows.store import InputRows

__all__ = ["SAMPLED_BATCHES", "fill_caches"]

SAMPLED_BATCHES = 8
_EPOCH = (1 << 62) + 2
"""Names the draws of these batches."""
_TRIAL_ROWS, _TRIALS = 4096, 3


def fill_caches(
    store: InputRows, part: Part, cache: Cache, seeds: Tensor, fanouts: Sequence[int], seed: int
) -> None:
    """Samples some batches, times misses by type, and copies the chosen rows; every rank calls it.

    Args:
        store: this rank's rows.
        part: this rank's part.
        cache: memory and policy.
        seeds: this rank's share of as many batches as may be sampled, one after another.
        fanouts: as of training.
        seed: of the draws.

    """
    remote = {
        name: table
        for name, table in store.tables.items()
        if table.owners is not None and name in store.features
    }
    counts = {name: torch.zeros(table.num_nodes) for name, table in remote.items()}
    for number, chunk in enumerate(seeds.chunk(SAMPLED_BATCHES)):
        batch = part.sample(chunk, fanouts, epoch=_EPOCH, step=number, seed=seed)
        wanted = {**batch.inputs}
        if part.uses_dst:
            target = part.schema.target
            wanted[target] = torch.cat([wanted.get(target, chunk[:0]), chunk]).unique()
        for name, ids in wanted.items():
            if name in counts:
                counts[name][ids] += 1
    for name, table in remote.items():
        assert table.owners is not None, "it is remote"
        counts[name][table.owners.owned_by(store.rank, table.num_nodes)] = 0
    row_bytes = {name: table.rows.shape[1] * 4 for name, table in remote.items()}
    ids = fill_cache(counts, _time_misses(store, counts), row_bytes, int(cache.bytes), cache.policy)
    requests = store.read_features(ids)
    for name, request in requests.items():
        rows = request.rows.clone()
        remote[name].cache = RemoteRowCache(request.ids, rows, remote[name].num_nodes)
    store.release(requests)


def _time_misses(store: InputRows, counts: dict[str, Tensor]) -> dict[str, float]:
    """Seconds that a remote row of each type adds to an exchange; every rank times the same types."""
    nothing = {name: torch.empty(0, dtype=torch.int64) for name in counts}
    empty_s = _fastest(store, nothing)
    miss_s = {}
    for name, count in counts.items():
        ids = count.nonzero()[:_TRIAL_ROWS, 0]
        taken_s = _fastest(store, {**nothing, name: ids})
        # A type whose few rows take no measurable time is still worth its bytes.
        least_s = 1e-9 * store.tables[name].rows.shape[1]
        miss_s[name] = max((taken_s - empty_s) / max(len(ids), 1), least_s)
    return miss_s


def _fastest(store: InputRows, wanted: dict[str, Tensor]) -> float:
    times = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        requests = store.read_features(wanted)
        times.append(time.perf_counter() - began)
        store.release(requests)
    return min(times)
