"""Fills caches with the rows that batches ask for, by what a miss costs.

Of other hosts' rows, features alone are copied: another rank's copy of a learnable row would have to
be sent again after each step in which anybody touched the row, at least as often as it is read. On
the model's device lie rows of this host, of both kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heta.graph.part import Part
from heta.rows.cache import Cache, RemoteRowCache, fill_cache
from heta.rows.device_rows import DeviceRows
from heta.rows.store import InputRows
from heta.rows.tables import Table

__all__ = [
    "SAMPLED_BATCHES",
    "count_reads",
    "fill_device",
    "fill_remote",
    "time_host_misses",
]

SAMPLED_BATCHES = 8
_EPOCH = (1 << 62) + 2
"""Names the draws of these batches."""
_TRIAL_ROWS, _TRIALS = 4096, 3


def fill_remote(
    store: InputRows, part: Part, cache: Cache, seeds: Tensor, fanouts: Sequence[int], seed: int
) -> None:
    """Copies other ranks' features; every rank calls it.

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
    counts = count_reads(part, seeds, fanouts, seed)
    counts = {name: counts[name] for name in remote}
    for name, table in remote.items():
        assert table.owners is not None, "it is remote"
        counts[name][table.owners.owned_by(store.rank, table.num_nodes)] = 0
    row_bytes = {name: table.rows.shape[1] * 4 for name, table in remote.items()}
    # The copies lie on the host, and may be more than a GPU holds.
    device, store.device = store.device, torch.device("cpu")
    try:
        miss_s = _time_remote_misses(store, counts)
        ids = fill_cache(counts, miss_s, row_bytes, int(cache.bytes), cache.policy)
        requests = store.read_features(ids)
        for name, request in requests.items():
            rows = request.rows.clone()
            remote[name].cache = RemoteRowCache(request.ids, rows, remote[name].num_nodes)
        store.release(requests)
    finally:
        store.device = device


def fill_device(
    store: InputRows, part: Part, cache: Cache, seeds: Tensor, fanouts: Sequence[int], seed: int
) -> None:
    """Puts rows of this host on the model's device, learnable ones with their optimizer's state.

    Args:
        store, part, cache, seeds, fanouts, seed: as of `fill_remote`.
    """
    reads = count_reads(part, seeds, fanouts, seed)
    counts, miss_s, row_bytes = {}, {}, {}
    for name, table in store.tables.items():
        owned = None if table.owners is None else table.owners.owned_by(store.rank, table.num_nodes)
        counts[name] = reads[name] if owned is None else reads[name][owned]
        miss_s[name] = time_host_misses(store, table, counts[name])
        values = [table.rows, *table.state.values()]
        row_bytes[name] = sum(each.element_size() * each[:1].numel() for each in values)
    kept = {name: table for name, table in store.tables.items() if len(table.rows)}
    chosen = fill_cache(
        {name: counts[name] for name in kept},
        {name: miss_s[name] for name in kept},
        {name: row_bytes[name] for name in kept},
        int(cache.bytes),
        cache.policy,
    )
    for name, where in chosen.items():
        table = store.tables[name]
        table.on_device = DeviceRows(table.rows, table.state, where, store.device)


def count_reads(part: Part, seeds: Tensor, fanouts: Sequence[int], seed: int) -> dict[str, Tensor]:
    """How often some sampled batches read each row, by type."""
    counts = {name: torch.zeros(count) for name, count in part.schema.num_nodes.items()}
    target = part.schema.target
    for number, chunk in enumerate(seeds.chunk(SAMPLED_BATCHES)):
        batch = part.sample(chunk, fanouts, epoch=_EPOCH, step=number, seed=seed)
        wanted = {**batch.inputs}
        if part.uses_dst:
            wanted[target] = torch.cat([wanted.get(target, chunk[:0]), chunk]).unique()
        for name, ids in wanted.items():
            counts[name][ids] += 1
    return counts


def _time_remote_misses(store: InputRows, counts: dict[str, Tensor]) -> dict[str, float]:
    """Seconds that a remote row of each type adds to an exchange; every rank times the same types."""
    nothing = {name: torch.empty(0, dtype=torch.int64) for name in counts}
    empty_s = _time_reads(store, nothing)
    miss_s = {}
    for name, count in counts.items():
        ids = count.nonzero()[:_TRIAL_ROWS, 0]
        taken_s = _time_reads(store, {**nothing, name: ids})
        miss_s[name] = _divide(taken_s - empty_s, len(ids), store.tables[name].rows.shape[1])
    return miss_s


def time_host_misses(store: InputRows, table: Table, counts: Tensor) -> float:
    """Seconds to fetch a row of this host, and to send back and apply a learnable one's gradient."""
    where = counts.nonzero()[:_TRIAL_ROWS, 0]
    dim = table.rows.shape[1]
    rows = torch.empty(len(where), dim, device=store.device)
    # Copies: a gradient of zeros moves the row of an optimizer that has moments.
    trial = Table(
        table.rows[where],
        None,
        table.is_learnable,
        len(where),
        {name: values[where].clone() for name, values in table.state.items()},
    )

    def miss(count: int) -> None:
        table.read_to_device(where[:count], rows[:count])
        if table.is_learnable:
            trial.update(store.optimizer, torch.arange(count), torch.zeros_like(rows[:count]))
        rows[:1].cpu()  # waits for the device

    return _divide(_fastest(lambda: miss(len(where))) - _fastest(lambda: miss(0)), len(where), dim)


def _divide(taken_s: float, count: int, dim: int) -> float:
    """Seconds a row; a type whose few rows take no measurable time is still worth its bytes."""
    return max(taken_s / max(count, 1), 1e-9 * dim)


def _time_reads(store: InputRows, wanted: dict[str, Tensor]) -> float:
    return _fastest(lambda: store.release(store.read_features(wanted)))


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
