"""Events come out of each file format as they went in; what is unusable is named."""

import errno
import logging

import numpy as np
import pytest
import torch

from shared.data import tables
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


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
    events = tables.read_events(path)
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
        tables.from_table(frame, **names)
    frame["when"] = pandas.to_datetime(frame["when"])
    events = tables.from_table(frame, **names)
    assert events.t.tolist() == [1_356_998_400, 1_356_998_402]
    assert events.eid.tolist() == [8, 9]
    assert events.features is None
    frame["when"] = frame["when"].dt.tz_localize("America/New_York")
    assert tables.from_table(frame, **names).t.tolist() == [1_357_016_400, 1_357_016_402]
    frame["when"] += pandas.Timedelta(milliseconds=500)
    assert tables.from_table(frame, **names).t.tolist() == [1_357_016_400.5, 1_357_016_402.5]


def test_whole_numbers_may_be_floats():
    events = tables.from_table(table(src=[3.0, 1.0, 2.0]))
    assert events.src.tolist() == [3, 1, 2]


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
        tables.from_table(table(**changes))


def test_read_events_refuses(tmp_path):
    with pytest.raises(DataError, match="there is nothing; check the path"):
        tables.read_events(tmp_path / "none.csv")
    (tmp_path / "events.txt").write_text("a")
    with pytest.raises(DataError, match=r"expected .parquet, .csv, .csv.gz or a folder"):
        tables.read_events(tmp_path / "events.txt")
    (tmp_path / "events.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"events.csv: expected columns 'src', 'dst' and 't'"):
        tables.read_events(tmp_path / "events.csv")
    (tmp_path / "events.csv").write_text("")
    with pytest.raises(DataError, match=r"events.csv: expected a table"):
        tables.read_events(tmp_path / "events.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected ml_<name>.csv or <name>_edgelist.csv"):
        tables.read_events(tmp_path / "empty")


def test_temporal_data_keeps_its_columns():
    pyg = pytest.importorskip("torch_geometric.data", reason="reads PyG's TemporalData")
    given = pyg.TemporalData(
        src=torch.tensor([0, 1]),
        dst=torch.tensor([2, 3]),
        t=torch.tensor([5, 7]),
        msg=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    )
    events = tables.from_temporal_data(given)
    for ours, theirs in ((events.src, given.src), (events.dst, given.dst), (events.t, given.t)):
        assert torch.equal(ours, theirs)
    assert torch.equal(events.features, given.msg)
    given.msg = torch.tensor([1.0, 2.0])
    assert tables.from_temporal_data(given).features.tolist() == [[1.0], [2.0]]
    with pytest.raises(DataError, match="got a TemporalData without dst"):
        tables.from_temporal_data(pyg.TemporalData(src=given.src, t=given.t))


def test_a_folder_as_tgn_prepares_it(tmp_path):
    text = ",u,i,ts,label,idx\n0,1,4,0.0,0,1\n1,2,5,36.5,0,2\n"
    (tmp_path / "ml_toy.csv").write_text(text)
    plain = tables.read_events(tmp_path)
    assert plain.features is None
    np.save(tmp_path / "ml_toy.npy", np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
    np.save(tmp_path / "ml_toy_node.npy", np.zeros((6, 2)))
    events = tables.read_events(tmp_path)
    assert events.src.tolist() == [1, 2]
    assert events.dst.tolist() == [4, 5]
    assert events.t.tolist() == [0.0, 36.5]
    assert events.eid.tolist() == [1, 2]
    assert events.features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    np.save(tmp_path / "ml_toy.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"a row for each idx up to 2 in ml_toy.npy"):
        tables.read_events(tmp_path)
    np.save(tmp_path / "ml_toy.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"expected an array of numbers in ml_toy.npy"):
        tables.read_events(tmp_path)
    (tmp_path / "ml_toy.csv").write_text("u,i,ts\n1,2,3\n")
    with pytest.raises(DataError, match="expected columns u, i, ts and idx"):
        tables.read_events(tmp_path)
    (tmp_path / "ml_other.csv").write_text(text)
    with pytest.raises(DataError, match=r"expected one ml_<name>.csv, got \['ml_other.csv'"):
        tables.read_events(tmp_path)


def test_an_edge_list_in_jodies_form(tmp_path):
    # The form of tgbl-wiki: one header word for all features, items numbered from 0.
    (tmp_path / "tgbl-wiki_edgelist.csv").write_text(
        "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n"
        "0,0,0.0,0,0.1,0.2\n1,1,1.0,0,0.3,0.4\n"
    )
    events = tables.read_events(tmp_path)
    assert events.src.tolist() == [0, 1]
    assert events.dst.tolist() == [2, 3]
    assert events.t.tolist() == [0.0, 1.0]
    assert events.features.numpy() == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert events.label == "tgbl-wiki"


def test_an_edge_list_of_names_and_dates(tmp_path, caplog):
    # The form of tgbl-flight.
    (tmp_path / "tgbl-flight_edgelist.csv").write_text(
        "timestamp,src,dst,callsign,weight\n"
        "2019-01-02,EGLL,KJFK,BAW1,1.5\n2019-01-01,LFPG,EGLL,BAW2,2.5\n"
    )
    with caplog.at_level(logging.WARNING):
        events = tables.read_events(tmp_path)
    assert events.src.tolist() == [2, 0]
    assert events.dst.tolist() == [0, 1]
    assert events.t.tolist() == [1_546_300_800, 1_546_387_200]
    assert events.features.tolist() == [[2.5], [1.5]]
    assert "callsign" in caplog.text


def test_an_edge_list_of_numbers_keeps_its_ids(tmp_path):
    (tmp_path / "x_edgelist.csv").write_text("day,u,v,weight\n7,10,20,1\n8,20,30,2\n")
    events = tables.read_events(tmp_path)
    assert events.src.tolist() == [10, 20]
    assert events.dst.tolist() == [20, 30]
    assert events.t.tolist() == [7, 8]
    (tmp_path / "x_edgelist.csv").write_text("day,u,v,idx\n7,10,20,5\n8,20,30,4\n")
    events = tables.read_events(tmp_path)
    assert events.eid.tolist() == [5, 4]
    assert events.features is None
    (tmp_path / "x_edgelist.csv").write_text("day,u,weight\n7,10,1\n")
    with pytest.raises(DataError, match=r"expected a column named one of \['dst'"):
        tables.read_events(tmp_path)
    (tmp_path / "x_edgelist.csv").write_text("day,src,dst\nsoon,10,1\n")
    with pytest.raises(DataError, match="day: expected numbers or dates"):
        tables.read_events(tmp_path)


def test_a_column_of_ids_is_a_feature_where_no_ids_are_asked_for(tmp_path):
    table(eid=[7, 8, 9]).to_csv(tmp_path / "events.csv", index=False)
    events = tables.read_table(tmp_path / "events.csv", eid=None)
    assert events.eid.tolist() == [1, 2, 0]
    assert events.features.tolist() == [[1.5, 8], [2.5, 9], [0.5, 7]]
    assert tables.read_table(tmp_path / "events.csv").eid.tolist() == [8, 9, 7]


def test_a_file_that_may_not_be_read_is_told_as_that(tmp_path, monkeypatch):
    path = tmp_path / "events.csv"
    table().to_csv(path, index=False)

    def refused(given):
        raise PermissionError(errno.EACCES, "Permission denied", str(given))

    monkeypatch.setattr(pandas, "read_csv", refused)  # root may read everything
    with pytest.raises(DataError, match="expected a file that this user may read, got 'Permission"):
        tables.read_table(path)
