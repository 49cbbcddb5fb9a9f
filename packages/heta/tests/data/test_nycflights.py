"""The graph of flights: counts, joins, tasks, and that no label is to be read from an input."""

import functools
import importlib
import sys

import numpy as np
import pytest
import torch

from heta.data.nycflights import TASKS, flights
from shared.data.flights import read_flight_table
from shared.errors import ConfigError, DataError

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

VISIB = 7  # column of the visibility among the weather's features
NAMES = ("operated_by", "by_carrier", "departs", "arrives", "on", "under", "next_leg")


@functools.cache
def small(task="late15"):
    return flights(task, days=24)


@pytest.fixture(scope="module")
def table():
    """Flights of the same days, in the order of the nodes."""
    rows = read_flight_table("flights")
    dates = rows[["month", "day"]].drop_duplicates().sort_values(["month", "day"])
    kept = dates.iloc[np.linspace(0, 364, 24).astype(int)]
    rows = rows.merge(kept, on=["month", "day"])
    order = ["month", "day", "hour", "minute"]
    return rows.sort_values(order, kind="stable", ignore_index=True)


def test_has_14_relations_each_beside_its_reverse():
    graph = small()
    assert len(graph.schema.relations) == 14
    for src, name, dst in graph.schema.relations:
        if not name.startswith("rev_"):
            there, back = graph.edges[src, name, dst], graph.edges[dst, f"rev_{name}", src]
            assert all(torch.equal(*pair) for pair in zip(there, back[::-1], strict=True))
    assert {name for _, name, _ in graph.schema.relations} >= set(NAMES)
    assert graph.schema.learnable == ("carrier",)
    assert len(graph.schema.roots) == 8


def test_edges_are_the_joins_of_the_tables(table):
    graph = small()
    ids = graph.node_ids
    assert graph.num_nodes["flight"] == len(table)
    for name, kind, column in (
        ("operated_by", "plane", "tailnum"),
        ("by_carrier", "carrier", "carrier"),
        ("departs", "airport", "origin"),
        ("arrives", "airport", "dest"),
    ):
        src, dst = graph.edges["flight", name, kind]
        has_end = table[column].notna().to_numpy()
        assert src.tolist() == np.flatnonzero(has_end).tolist()
        assert ids[kind][dst].tolist() == table[column][has_end].tolist()
    day = table.groupby(["month", "day"], sort=False).ngroup()
    assert graph.edges["flight", "on", "day"][1].tolist() == day.tolist()


def test_weather_is_that_of_the_origin_at_the_scheduled_hour(table):
    graph = small()
    weather = read_flight_table("weather")
    by_key = weather.drop_duplicates(["origin", "month", "day", "hour"]).set_index(
        ["origin", "month", "day", "hour"]
    )["visib"]
    key = list(table[["origin", "month", "day", "hour"]].itertuples(index=False, name=None))
    src, dst = graph.edges["flight", "under", "weather"]
    assert src.tolist() == [flight for flight, hour in enumerate(key) if hour in by_key.index]
    visib = graph.feat["weather"][dst, VISIB]
    expected = [(by_key[key[flight]] - 9) / 2 for flight in src.tolist()]
    torch.testing.assert_close(visib, torch.tensor(expected, dtype=torch.float32))


def test_next_leg_is_the_next_schedule_of_the_same_plane(table):
    last, expected = {}, set()
    for flight, tail in enumerate(table["tailnum"]):
        if isinstance(tail, str):
            if tail in last:
                expected.add((last[tail], flight))
            last[tail] = flight
    src, dst = small().edges["flight", "next_leg", "flight"]
    assert set(zip(src.tolist(), dst.tolist(), strict=True)) == expected
    assert len(src) == len(expected)


def test_late15_labels_arrivals_and_splits_by_time(table):
    graph = small()
    delay = table["arr_delay"]
    expected = [-1 if np.isnan(minutes) else int(minutes > 15) for minutes in delay]
    assert graph.label.tolist() == expected
    month, has_label = table["month"].to_numpy(), delay.notna().to_numpy()
    for split, months in (("train", range(1, 9)), ("val", (9, 10)), ("test", (11, 12))):
        assert graph.masks[split].tolist() == (np.isin(month, months) & has_label).tolist()


def test_cancelled_does_not_show_which_flights_lack_a_plane(table):
    graph = small("cancelled")
    assert graph.label.tolist() == table["dep_time"].isna().astype(int).tolist()
    assert "plane" not in graph.num_nodes
    assert len(graph.schema.relations) == 10
    # Each flight has the same number of edges of each relation, whatever its label, but of weather.
    for relation in graph.schema.relations:
        if relation[0] == "flight" and relation[1] != "under":
            assert (graph.edges[relation][0].bincount() == 1).all()


def test_carrier_is_that_of_most_flights_and_is_not_shown(table):
    graph = small("carrier")
    assert graph.target == "plane"
    assert "carrier" not in graph.num_nodes
    assert len(graph.schema.relations) == 12
    carriers = sorted(table["carrier"].unique())
    counts = table.groupby("tailnum")["carrier"].agg(
        lambda flown: min(flown.mode(), key=carriers.index)
    )
    assert [carriers[label] for label in graph.label.tolist()] == counts.tolist()
    total = sum(mask.int() for mask in graph.masks.values())
    assert (total == 1).all()
    first = (
        table.reset_index().dropna(subset="tailnum").groupby("tailnum")["index"].min().to_numpy()
    )
    assert first[graph.masks["train"]].max() < first[graph.masks["val"]].min()
    assert first[graph.masks["val"]].max() < first[graph.masks["test"]].min()
    assert graph.masks["train"].float().mean() == pytest.approx(0.6, abs=0.01)


def test_no_single_feature_tells_the_label():
    from sklearn.metrics import roc_auc_score

    graph = small()
    has_label = graph.label >= 0
    for column in graph.feat["flight"].T:
        assert 0.3 < roc_auc_score(graph.label[has_label], column[has_label]) < 0.7


def test_features_flag_missing_values_and_have_fixed_scales():
    graph = small()
    planes = read_flight_table("planes").set_index("tailnum").reindex(graph.node_ids["plane"])
    rows = graph.feat["plane"]
    missing = planes["seats"].isna().to_numpy(copy=True)
    assert missing.any()
    assert (rows[missing, 1] == 0).all()
    assert rows[:, 4].bool().tolist() == missing.tolist()
    scaled = (torch.tensor(planes["seats"].to_numpy(copy=True)[~missing]) - 150) / 70
    torch.testing.assert_close(rows[~missing, 1], scaled.float().clip(-5, 5))
    for kind, feat in graph.feat.items():
        assert feat.abs().max() <= 5, kind
    # A day's row does not depend on which other days are there.
    assert torch.equal(graph.feat["day"][0], flights(days=2).feat["day"][0])


def test_days_carry_the_weekday():
    day = small().feat["day"]
    # 1 January 2013 was a Tuesday.
    assert day[0, 2:].tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_rows_become_learnable_on_request():
    graph = flights(days=2, learnable=["plane", "airport"])
    assert graph.schema.learnable == ("plane", "carrier", "airport")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "late"}, "task: expected one of late15, cancelled, carrier, got 'late'"),
        ({"days": 0}, "days: expected 1 to 365, got 0"),
        ({"days": 366}, "days: expected 1 to 365, got 366"),
        (
            {"task": "carrier", "days": 1, "learnable": ["carrier"]},
            r"learnable: expected some of .*, got \['carrier'\]",
        ),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        flights(**options)


@pytest.mark.slow
def test_all_of_2013_has_the_documented_counts():
    graph = flights()
    assert graph.num_nodes == {
        "flight": 336_776,
        "plane": 4_043,
        "carrier": 16,
        "airport": 107,
        "weather": 26_112,
        "day": 365,
    }
    counts = {name: count for (_, name, _), count in graph.schema.num_edges.items()}
    assert counts["operated_by"] == 334_264
    assert counts["under"] == 335_220
    assert counts["next_leg"] == 330_221
    assert sum(counts.values()) == 4_693_618
    assert graph.num_unlabelled == 336_776 - 327_346
    rates = {split: graph.label[mask].float().mean() for split, mask in graph.masks.items()}
    sizes = {split: int(mask.sum()) for split, mask in graph.masks.items()}
    assert sizes == {"train": 217_727, "val": 55_628, "test": 53_991}
    assert rates == pytest.approx({"train": 0.256, "val": 0.151, "test": 0.250}, abs=5e-4)
    assert int(flights("cancelled").label.sum()) == 8_255
    assert len(TASKS) == 3


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "heta.data.nycflights")
    module = importlib.import_module("heta.data.nycflights")
    with pytest.raises(DataError, match="flights: needs pandas; run: pip install pandas"):
        module.flights(days=1)
