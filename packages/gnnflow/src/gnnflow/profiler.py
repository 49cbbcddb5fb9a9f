"""How fast this machine inserts a stream and samples it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from gnnflow.graph.temporal_graph import Stats, TemporalGraph
from gnnflow.sampling.policies import SAMPLING_POLICIES
from gnnflow.sampling.sampler import TemporalSampler
from shared.data.events import Events
from shared.errors import ConfigError, DataError

__all__ = ["Throughput", "measure", "time_insertion", "time_sampling"]

_REPEATS = 5
_BATCH = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What insertion and sampling take; `str()` of it is a few lines.

    Attributes:
        increment: events an insertion.
        fanout: neighbours a root, at most.
        inserted_events_per_s: into a graph of both directions.
        sampled_neighbors_per_s: by the name of the sampling policy.
        stats: of the graph after the stream.
    """

    increment: int
    fanout: int
    inserted_events_per_s: float
    sampled_neighbors_per_s: dict[str, float]
    stats: Stats

    def __str__(self) -> str:
        rate = self.inserted_events_per_s / 1e6
        sampled = [
            f"sampling, {policy}, {self.fanout} a root: {rate / 1e6:.1f} M neighbours/s"
            for policy, rate in self.sampled_neighbors_per_s.items()
        ]
        stats = self.stats
        blocks = (
            f"{stats.num_blocks:,} blocks, {100 * stats.fill:.1f} % full, "
            f"{stats.bytes_per_entry:.1f} bytes an entry"
        )
        first = f"insertion by {self.increment:,}: {rate:.2f} M events/s"
        return "\n".join([first, *sampled, blocks])


def measure(events: Events, increment: int, fanout: int) -> Throughput:
    """Inserts a stream and samples it by every policy; medians of five runs after a first one.

    Args:
        events: the stream, in any order.
        increment: events an insertion.
        fanout: neighbours a root.

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
    graph, sampled = runs[-1][1], {}
    for policy in SAMPLING_POLICIES:
        sampler = TemporalSampler(graph, [fanout], policy=policy)
        times = [time_sampling(sampler, events) for _ in range(_REPEATS + 1)][1:]
        sampled[policy] = times[0][1] / median(seconds for seconds, _ in times)
    return Throughput(
        increment=increment,
        fanout=fanout,
        inserted_events_per_s=len(events) / median(seconds for seconds, _ in runs),
        sampled_neighbors_per_s=sampled,
        stats=graph.stats(),
    )


def time_insertion(events: Events, increment: int) -> tuple[float, TemporalGraph]:
    """Seconds to insert a stream by increments, both directions; and the graph."""
    time_dtype = "float64" if events.t.is_floating_point() else "int64"
    graph = TemporalGraph(undirected=True, time_dtype=time_dtype)
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
        for roots in (part.src, part.dst):
            mfg = sampler.sample(roots, part.t)
            num_sampled += len(mfg.snapshot(0)[0].row)
    return time.perf_counter() - begin, num_sampled
