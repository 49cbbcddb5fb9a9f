"""Streams come out of each format as they went in; what is unusable is named."""

import logging

import numpy as np
import pytest
import torch

from gnnflow.data import streams as data
from shared.errors import ConfigError, DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


@pytest.fixture(scope="module")
def year():
    try:
        return data.flights()
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
    few = data.flights(1000)
    assert few.digest() == year[:1000].digest()
    assert torch.equal(few.features, year.features[:1000])
    with pytest.raises(ConfigError, match="limit of 0 or more, got -1"):
        data.flights(-1)


def test_zipf_is_skewed_sorted_and_says_what_it_is():
    events = data.zipf(1000, 50_000, seed=3)
    assert len(events) == 50_000
    assert events.is_sorted
    assert events.num_nodes <= 1000
    assert (events.src != events.dst).all()
    assert events.label.startswith("generated: Zipf")
    harmonic = sum(1 / n for n in range(1, 1001))
    counts = torch.bincount(events.src, minlength=1000).sort(descending=True).values
    for n in (1, 2, 10):
        share = 1 / n / harmonic
        assert float(counts[n - 1]) / 50_000 == pytest.approx(share, rel=0.1)
    assert data.zipf(1000, 500, 3).digest() == data.zipf(1000, 500, 3).digest()
    assert data.zipf(1000, 500, 3).digest() != data.zipf(1000, 500, 4).digest()
    even = data.zipf(10, 20_000, exponent=0)
    assert torch.bincount(even.src).min() > 1800
    assert len(data.zipf(2, 0)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 1}, "expected 2 nodes or more and 0 events or more, got 1, 5"),
        ({"num_events": -1}, "got 5, -1"),
        ({"exponent": -1}, "expected an exponent of 0 or more, got -1"),
    ],
)
def test_zipf_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        data.zipf(**({"num_nodes": 5, "num_events": 5} | arguments))


def table(**changes):
    columns = {"src": [3, 1, 2], "dst": [4, 5, 6], "t": [30, 10, 20], "w": [0.5, 1.5, 2.5]}
    return pandas.DataFrame(columns | changes)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_tables_are_read_by_time(tmp_path, suffix):
    path = tmp_path / f"events{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
        table().to_parquet(path)
    else:
        table().to_csv(path, index=False)
    events = data.read_events(path)
    assert events.src.tolist() == [1, 2, 3]
    assert events.dst.tolist() == [5, 6, 4]
    assert events.t.tolist() == [10, 20, 30]
    assert events.eid.tolist() == [1, 2, 0]
    assert events.features.tolist() == [[1.5], [2.5], [0.5]]
    assert events.label == path.name


def test_columns_may_have_other_names_and_times_be_dates():
    frame = pandas.DataFrame(
        {
            "user": [0, 1],
            "item": [5, 6],
            "when": ["2013-01-01 00:00:00", "2013-01-01 00:00:02"],
            "row": [8, 9],
        }
    )
    names = {"src": "user", "dst": "item", "t": "when", "eid": "row"}
    with pytest.raises(DataError, match="when: expected numbers or dates"):
        data.from_table(frame, **names)
    frame["when"] = pandas.to_datetime(frame["when"])
    events = data.from_table(frame, **names)
    assert events.t.tolist() == [1_356_998_400, 1_356_998_402]
    assert events.eid.tolist() == [8, 9]
    assert events.features is None
    frame["when"] = frame["when"].dt.tz_localize("America/New_York")
    assert data.from_table(frame, **names).t.tolist() == [1_357_016_400, 1_357_016_402]
    frame["when"] += pandas.Timedelta(milliseconds=500)
    assert data.from_table(frame, **names).t.tolist() == [1_357_016_400.5, 1_357_016_402.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": ["a", "b", "c"]}, "src: expected whole numbers without gaps, got .*factorize"),
        ({"dst": [1.5, 2, 3]}, "dst: expected whole numbers"),
        ({"dst": [1, 2, None]}, "dst: expected whole numbers without gaps"),
        ({"src": [1, -2, 3]}, "src of event 1: expected 0 or more, got -2"),
        ({"t": [1, 2, None]}, "t of event 2: expected a finite time"),
        ({"w": ["a", "b", "c"]}, "expected features to be numbers, column 'w' is not"),
        ({"w": [1, 2, float("inf")]}, "features of event 2, column 0"),
        ({"t": pandas.to_datetime(["2013-01-01", None, None])}, "t of row 1: expected a date"),
    ],
)
def test_tables_refuse(changes, message):
    with pytest.raises(DataError, match=message):
        data.from_table(table(**changes))


def test_read_events_refuses(tmp_path):
    with pytest.raises(DataError, match="there is nothing; check the path"):
        data.read_events(tmp_path / "none.csv")
    (tmp_path / "events.txt").write_text("a")
    with pytest.raises(DataError, match=r"expected .parquet, .csv, .csv.gz or a folder"):
        data.read_events(tmp_path / "events.txt")
    (tmp_path / "events.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"events.csv: expected columns 'src', 'dst' and 't'"):
        data.read_events(tmp_path / "events.csv")
    (tmp_path / "events.csv").write_text("")
    with pytest.raises(DataError, match=r"events.csv: expected a table"):
        data.read_events(tmp_path / "events.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected ml_<name>.csv or <name>_edgelist.csv"):
        data.read_events(tmp_path / "empty")


def test_temporal_data_keeps_its_columns():
    pyg = pytest.importorskip("torch_geometric.data", reason="reads PyG's TemporalData")
    given = pyg.TemporalData(
        src=torch.tensor([0, 1]),
        dst=torch.tensor([2, 3]),
        t=torch.tensor([5, 7]),
        msg=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    )
    events = data.from_temporal_data(given)
    for ours, theirs in ((events.src, given.src), (events.dst, given.dst), (events.t, given.t)):
        assert torch.equal(ours, theirs)
    assert torch.equal(events.features, given.msg)
    given.msg = torch.tensor([1.0, 2.0])
    assert data.from_temporal_data(given).features.tolist() == [[1.0], [2.0]]
    with pytest.raises(DataError, match="got a TemporalData without dst"):
        data.from_temporal_data(pyg.TemporalData(src=given.src, t=given.t))


def test_a_folder_as_tgn_prepares_it(tmp_path):
    text = ",u,i,ts,label,idx\n0,1,4,0.0,0,1\n1,2,5,36.5,0,2\n"
    (tmp_path / "ml_toy.csv").write_text(text)
    plain = data.read_events(tmp_path)
    assert plain.features is None
    np.save(tmp_path / "ml_toy.npy", np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
    np.save(tmp_path / "ml_toy_node.npy", np.zeros((6, 2)))
    events = data.read_events(tmp_path)
    assert events.src.tolist() == [1, 2]
    assert events.dst.tolist() == [4, 5]
    assert events.t.tolist() == [0.0, 36.5]
    assert events.eid.tolist() == [1, 2]
    assert events.features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    np.save(tmp_path / "ml_toy.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"a row for each idx up to 2 in ml_toy.npy"):
        data.read_events(tmp_path)
    np.save(tmp_path / "ml_toy.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"expected an array of numbers in ml_toy.npy"):
        data.read_events(tmp_path)
    (tmp_path / "ml_toy.csv").write_text("u,i,ts\n1,2,3\n")
    with pytest.raises(DataError, match="expected columns u, i, ts and idx"):
        data.read_events(tmp_path)
    (tmp_path / "ml_other.csv").write_text(text)
    with pytest.raises(DataError, match=r"expected one ml_<name>.csv, got \['ml_other.csv'"):
        data.read_events(tmp_path)


def test_an_edge_list_in_jodies_form(tmp_path):
    # The form of tgbl-wiki: one header word for all features, items numbered from 0.
    (tmp_path / "tgbl-wiki_edgelist.csv").write_text(
        "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n"
        "0,0,0.0,0,0.1,0.2\n1,1,1.0,0,0.3,0.4\n"
    )
    events = data.read_events(tmp_path)
    assert events.src.tolist() == [0, 1]
    assert events.dst.tolist() == [2, 3]
    assert events.t.tolist() == [0.0, 1.0]
    assert events.features.numpy() == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert events.label == "tgbl-wiki"


def test_an_edge_list_of_names_and_dates(tmp_path, caplog):
    # The form of tgbl-flight.
    (tmp_path / "tgbl-flight_edgelist.csv").write_text(
        "timestamp,src,dst,callsign,weight\n"
        "2019-01-02,EGLL,KJFK,BAW1,1.5\n2019-01-01,KJFK,EGLL,BAW2,2.5\n"
    )
    with caplog.at_level(logging.WARNING):
        events = data.read_events(tmp_path)
    assert events.src.tolist() == [1, 0]
    assert events.dst.tolist() == [0, 1]
    assert events.t.tolist() == [1_546_300_800, 1_546_387_200]
    assert events.features.tolist() == [[2.5], [1.5]]
    assert "callsign" in caplog.text


def test_an_edge_list_of_numbers_keeps_its_ids(tmp_path):
    (tmp_path / "x_edgelist.csv").write_text("day,u,v,weight\n7,10,20,1\n8,20,30,2\n")
    events = data.read_events(tmp_path)
    assert events.src.tolist() == [10, 20]
    assert events.dst.tolist() == [20, 30]
    assert events.t.tolist() == [7, 8]
    (tmp_path / "x_edgelist.csv").write_text("day,u,weight\n7,10,1\n")
    with pytest.raises(DataError, match=r"expected a column named one of \['dst'"):
        data.read_events(tmp_path)
    (tmp_path / "x_edgelist.csv").write_text("day,src,dst\nsoon,10,1\n")
    with pytest.raises(DataError, match="day: expected numbers or dates"):
        data.read_events(tmp_path)
