"""Events come out of each file format as they went in; what is unusable is named."""

from decimal import Decimal

import numpy as np
import pytest
import torch

from shared.data import tables
from shared.errors import ConfigError, DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


def table(**changes):
    columns = {"src": [3, 1, 2], "dst": [4, 5, 6], "t": [30, 10, 20], "w": [0.5, 1.5, 2.5]}
    return pandas.DataFrame(columns | changes)


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
    assert tables.from_table(frame, **names).t.tolist() == [1_356_998_400, 1_356_998_402]
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
        ({"dst": [1.5, 2, 3]}, "dst: expected whole numbers"),
        ({"dst": [True, False, True]}, "dst: expected whole numbers or texts, got bool"),
        ({"dst": [1, 2, None]}, "dst of row 2: expected an id, got none; fill it, or leave"),
        ({"src": ["a", None, "b"]}, "src of row 1: expected an id, got none"),
        ({"src": [1, -2, 3]}, "src of row 1: expected 0 or more, got -2"),
        ({"src": ["a", "b", "c"], "dst": [1, 2, -7]}, "dst of row 2: expected 0 or more, got -7"),
        ({"t": [1, 2, None]}, "t of row 2: expected a time, got none"),
        ({"t": [1, -2, 3]}, "t of event 1: expected a finite time"),
        (
            {"t": ["2024-05-01", "soon", "x"]},
            "t of row 1: expected numbers or dates .*, got 'soon'",
        ),
        ({"t": ["2024-05-01", None, "x"]}, "t of row 1: expected a time, got none"),
        ({"t": ["2024-05-01", "now", "x"]}, "t of row 1: expected numbers or dates .*, got 'now'"),
        ({"t": ["2024-05-01", " today", "x"]}, "t of row 1: expected .*, got ' today'"),
        (
            {"t": pandas.Series(["2024-05-01", np.int64(5), "x"], dtype=object)},
            "t of row 1: .* got 5;",
        ),
        (
            {"t": np.array([2**63, 1, 2], np.uint64)},
            "t: expected .* below 2.63, got 9223372036854775808",
        ),
        ({"src": [Decimal("1.5"), 1, 2]}, "src of row 0: expected a whole number, got 1.5"),
        ({"t": ["2024-05-01", 5, "2024-05-01"]}, "t of row 1: expected numbers or dates .*, got 5"),
        ({"t": ["2024-05-01", "01/05/2024", "x"]}, "t of row 1: expected .* got '01/05/2024'"),
        ({"src": [2.0**54, 1, 2]}, "src: expected whole numbers up to 2.53, .* 18014398509481984"),
        ({"src": [b"a", b"b", b"c"]}, "src of row 0: expected a text, got b'a'; decode it"),
        ({"src": ["a", 1.5, 2]}, "src: expected whole numbers"),
        ({"eid": [2**63, 1, 2]}, "eid: expected whole numbers below 2.63, got 9223372036854775808"),
        ({"t": [True, False, True]}, "t: expected numbers or dates, got bool"),
        ({"t": pandas.to_datetime(["2013-01-01", None, None])}, "t of row 1: expected a time"),
        ({"w": [1, 2, float("inf")]}, "w of row 2: expected a finite number .* inf; .* --features"),
        ({"w": [1, None, 3]}, "w of row 1: expected a finite number as a feature, got nan"),
    ],
)
def test_tables_refuse(changes, message):
    with pytest.raises(DataError, match=message):
        tables.from_table(table(**changes))


def test_missing_columns_are_told_with_the_options_that_name_them():
    frame = pandas.DataFrame({"User_ID": [1], "shop": [2], "when": [3]})
    told = r"got \['User_ID', 'shop', 'when'\]; .*: --src User_ID --dst COLUMN --t when$"
    with pytest.raises(DataError, match=told):
        tables.from_table(frame)
    with pytest.raises(
        DataError, match=r"expected columns 'shop', 'dst' and 't'.* --dst COLUMN --t"
    ):
        tables.from_table(frame, src="shop")
    with pytest.raises(DataError, match="columns of --features, got no 'x' among"):
        tables.from_table(table(), features=("w", "x"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": "dst"}, "expected three different ones for src, dst and t, got dst, dst, t"),
        ({"time_unit": "h"}, "time_unit: expected one of s, ms, us, ns, got 'h'"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tables.Columns(**changes)


def test_texts_are_numbered_in_the_order_they_come_up():
    events = tables.from_table(table(src=["zoe", "abe", "zoe"], dst=["x", "zoe", "y"]))
    assert events.src.tolist() == [0, 2, 0]
    assert events.dst.tolist() == [1, 0, 3]
    assert events.nodes.ids.tolist() == ["zoe", "x", "abe", "y"]
    assert events.num_nodes == 4
    assert events[1:].nodes is events.sorted().nodes is events.nodes
    assert tables.Events.concat([events, events]).nodes is events.nodes
    mixed = tables.from_table(table(src=["a", "b", "a"], dst=[5.0, 6.0, 5.0]))
    assert mixed.nodes.ids.tolist() == ["a", "5", "b", "6"]
    assert tables.from_table(table()).nodes is None


def test_ids_far_above_the_number_of_rows_are_numbered_and_told(caplog):
    assert tables.from_table(table(dst=[4, 5, 1012])).nodes is None
    events = tables.from_table(table(dst=[4, 5, 1013]), label="x.csv")
    assert events.nodes.ids.tolist() == ["3", "4", "1", "5", "2", "1013"]
    assert events.src.tolist() == [0, 2, 4]
    assert "x.csv: ids up to 1013 are numbered from 0" in caplog.text
    assert tables.from_table(table(src=[10**12, 5, 10**12])).num_nodes == 4


@pytest.mark.parametrize(
    "values",
    [
        np.array([2**63 + 5, 7, 8], np.uint64),
        pandas.Series([2**63 + 5, 7.0, "8"], dtype=object),
        pandas.Series([Decimal(2**63 + 5), Decimal("7.00"), Decimal(8)]),
        pandas.Series([str(2**63 + 5), "7", "8"]),
        pandas.Series([str(2**63 + 5), "7", "8"], dtype="string[pyarrow]"),
        pandas.Series([str(2**63 + 5), "7", "8"]).astype("category"),
    ],
)
def test_ids_of_any_type_are_one_node_where_they_are_one_number(values):
    if isinstance(values, pandas.Series) and "pyarrow" in str(values.dtype):
        pytest.importorskip("pyarrow")
    events = tables.from_table(table(src=values, dst=[7.0, 8.0, 7.0]))
    assert events.nodes.ids.tolist() == ["9223372036854775813", "7", "8"]


def test_categories_that_are_numbers_are_read_as_these():
    floats = pandas.Series([3.0, 1.0, 2.0]).astype("category")
    assert tables.from_table(table(src=floats)).src.tolist() == [3, 1, 2]


def test_ends_of_two_kinds_with_equal_ids_are_two_nodes():
    events = tables.from_table(table(src=[5, 6, 5], dst=[5, 5, 7]), is_bipartite=True)
    assert events.src.tolist() == [0, 1, 0]
    assert events.dst.tolist() == [2, 2, 3]
    assert (events.nodes.ids.tolist(), events.nodes.num_sources) == (["5", "6", "5", "7"], 2)


def test_dates_may_have_zones_and_parts_of_a_second():
    texts = ["2013-01-01T02:00:00+02:00", "2013-01-01T00:00:02Z", "2013-01-01 00:00:03.5"]
    events = tables.from_table(table(t=texts))
    assert events.t.tolist() == [1_356_998_400, 1_356_998_402, 1_356_998_403.5]
    assert tables.from_table(table(t=["2013-01-01", "2013-01-02", "2013-01-03"])).t.tolist() == [
        1_356_998_400 + 86_400 * day for day in range(3)
    ]


FAR = ["2024-05-01T09:00:00", "2999-12-31T00:00:00", "9999-12-31T23:59:59"]
FAR_S = [1_714_554_000, 32_503_593_600, 253_402_300_799]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_dates_after_2262_are_seconds_as_others(unit, zone):
    dates = pandas.Series(np.array(FAR, f"datetime64[{unit}]"))
    if zone is not None:
        dates = dates.dt.tz_localize("UTC").dt.tz_convert(zone)
    assert tables.from_table(table(t=dates)).t.tolist() == FAR_S
    assert tables.from_table(table(t=[date.isoformat() for date in dates])).t.tolist() == FAR_S


@pytest.mark.parametrize("date", ["1600-01-01", "0001-01-01", "-0044-03-15", "1969-12-31"])
def test_dates_before_1970_are_refused(date):
    for dates in ([date, *FAR[:2]], np.array([date, *FAR[:2]], "datetime64[us]")):
        with pytest.raises(
            DataError, match="t of event 0: expected a finite time of at least 0, got -"
        ):
            tables.from_table(table(t=dates))


def test_parts_of_a_second_of_any_unit_stay():
    for unit, part in (("ms", "5"), ("us", "5"), ("ns", "5")):
        dates = np.array([f"2013-01-01T00:00:0{n}.{part}" for n in range(3)], f"datetime64[{unit}]")
        assert tables.from_table(table(t=dates)).t.tolist() == [
            1_356_998_400.5 + second for second in range(3)
        ]


def test_dates_may_have_blanks_around_them():
    dates = [" 1970-01-02", "1970-01-03\t", "1970-01-04"]
    assert tables.from_table(table(t=dates)).t.tolist() == [86_400, 172_800, 259_200]


def test_names_may_have_blanks_around_them():
    frame = table().rename(columns={"dst": " dst", "w": "w "})
    events = tables.from_table(frame, src="src ", features=("w",))
    assert events.dst.tolist() == [4, 5, 6]
    assert events.features.tolist() == [[0.5], [1.5], [2.5]]


def test_units_are_of_numbers_only():
    assert tables.from_table(table(), time_unit="ms").t.tolist() == [0.03, 0.01, 0.02]
    assert tables.from_table(table(t=[3000, 1000, 2000]), time_unit="ms").t.tolist() == [3, 1, 2]
    with pytest.raises(
        DataError, match=r"t: expected numbers for --time-unit ms.*leave the option"
    ):
        tables.from_table(table(t=["2013-01-01"] * 3), time_unit="ms")


def test_features_are_the_columns_asked_for_or_all_numbers(caplog):
    frame = table(note=["a", "b", "c"], v=[7, 8, 9], is_late=[True, False, True])
    assert tables.from_table(frame, label="x.csv").features.tolist() == [
        [0.5, 7, 1],
        [1.5, 8, 0],
        [2.5, 9, 1],
    ]
    assert (
        "x.csv: columns left out of the features, as they are no numbers: ['note']" in caplog.text
    )
    caplog.clear()
    assert tables.from_table(frame, features=("v", "w")).features.tolist() == [
        [7, 0.5],
        [8, 1.5],
        [9, 2.5],
    ]
    assert not caplog.records
    with pytest.raises(DataError, match="column 'note' is not; leave it out of --features"):
        tables.from_table(frame, features=("note",))
    assert tables.from_table(frame.drop(columns=["w", "v", "is_late"])).features is None


def test_rows_of_an_array_are_features_by_the_events_ids(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(8.0).reshape(4, 2))
    with pytest.raises(DataError, match=r"rows.npy: expected a row for each of 3 events.*\[4, 2\]"):
        tables.from_table(table(), edge_features=path)
    events = tables.from_table(table(eid=[3, 1, 2]), edge_features=path)
    assert events.features.tolist() == [[6, 7], [2, 3], [4, 5]]
    both = tables.from_table(table(eid=[3, 1, 2]), edge_features=path, features=("w",))
    assert both.features.tolist() == [[0.5, 6, 7], [1.5, 2, 3], [2.5, 4, 5]]
    with pytest.raises(DataError, match=r"rows.npy: expected a row for each id up to 4"):
        tables.from_table(table(eid=[3, 1, 4]), edge_features=path)
    np.save(path, np.arange(3))
    with pytest.raises(DataError, match=r"rows.npy: expected a row for each of 3 events"):
        tables.from_table(table(), edge_features=path)
    np.save(path, np.array([["a"], ["b"], ["c"]]))
    with pytest.raises(DataError, match=r"rows.npy: expected numbers, got <U1"):
        tables.from_table(table(), edge_features=path)
    np.save(path, np.arange(6).reshape(3, 2))
    assert tables.from_table(table(), edge_features=path).features.tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    with pytest.raises(DataError, match=r"none.npy: expected a .npy file, there is nothing"):
        tables.from_table(table(), edge_features=tmp_path / "none.npy")


def test_a_column_of_ids_is_a_feature_where_no_ids_are_asked_for():
    frame = table(eid=[7, 8, 9])
    events = tables.from_table(frame, eid=None)
    assert events.eid.tolist() == [0, 1, 2]
    assert events.features.tolist() == [[0.5, 7], [1.5, 8], [2.5, 9]]
    assert tables.from_table(frame).eid.tolist() == [7, 8, 9]


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
