"""How fast this machine inserts a stream and samples it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.sampling.sampler import TemporalSampler
from shared.data.events import Events
from shared.errors import ConfigError, DataError

__all__ = ["measure", "time_insertion", "time_sampling"]

_REPEATS = 5
_BATCH = 600


def time_insertion(events: Events, increment: int) -> tuple[float, TemporalGraph]:
    """Seconds to insert a stream by increments, both directions; and the graph."""
    graph = TemporalGraph(undirected=True, time_dtype=_time_dtype(events))
    parts = [events[at : at + increment] for at in range(0, len(events), increment)]
    begin = time.perf_counter()
    for part in parts:
        graph.add_edges(part.src, part.dst, part.t)
    return time.perf_counter() - begin, graph


def time_sampling(sampler: TemporalSampler, events: Events) -> tuple[float, int]:
    """Seconds to sample both ends of all events, batch by batch; and how many neighbours."""
    num_sampled = 0
    begin = time.perf_counter()
    for at in range(0, len(events), _BATCH):
        part = events[at : at + _BATCH]
        mfg = sampler.sample(part.src, part.t)
        num_sampled += len(mfg.snapshot(0)[0].row)
        mfg = sampler.sample(part.dst, part.t)
        num_sampled += len(mfg.snapshot(0)[0].row)
    return time.perf_counter() - begin, num_sampled


def measure(events: Events, increment: int, fanout: int) -> Iterator[str]:
    """Lines that say what insertion and sampling take; medians, the first run left out.

    Raises:
        ConfigError: the increment or the fanout is out of range.
        DataError: there are no events.
    """
    if increment < 1:
        raise ConfigError(f"increment: expected 1 event or more, got {increment}")
    if not len(events):
        raise DataError("expected at least one event to measure with, got none")
    events = events.sorted()
    runs = [time_insertion(events, increment) for _ in range(_REPEATS + 1)][1:]
    graph = runs[-1][1]
    rate = len(events) / median(seconds for seconds, _ in runs) / 1e6
    yield f"insertion by {increment:,}: {rate:.2f} M events/s"
    for policy in ("recent", "uniform"):
        sampler = TemporalSampler(graph, [fanout], policy=policy)
        times = [time_sampling(sampler, events) for _ in range(_REPEATS + 1)][1:]
        rate = times[0][1] / median(seconds for seconds, _ in times) / 1e6
        yield f"sampling, {policy}, {fanout} a root: {rate:.1f} M neighbours/s"
    stats = graph.stats()
    yield (
        f"{stats.num_blocks:,} blocks, {100 * stats.fill:.1f} % full, "
        f"{stats.bytes_per_entry:.1f} bytes an entry"
    )


def _time_dtype(events: Events):  # noqa: ANN202
    return "float64" if events.t.is_floating_point() else "int64"
