"""Streams are cut where the settings say; a round survives its file; clocks count once."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.training import rounds
from gnnflow.training.rounds import Round, StageClock, cut_increments, parse_span
from shared.data.events import Events
from shared.errors import ConfigError, DataError


def at(times):
    return Events([0] * len(times), [1] * len(times), times)


@given(
    st.lists(st.integers(0, 50), min_size=1).map(sorted),
    st.floats(0, 0.99),
    st.integers(1, 12),
)
def test_increments_of_a_length_of_time(times, warmup, days):
    events = at([86_400 * t // 4 for t in times])
    first, ends = cut_increments(events, warmup, f"{days}D")
    assert first == int(warmup * len(times))
    # Brute force: the increment of each event by its distance from the first one.
    which = [(t - times[first]) // (4 * days) for t in times[first:]]
    expected = [first + i for i in range(1, len(which)) if which[i] != which[i - 1]]
    assert ends == [*expected, len(times)]


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(1, 50))
def test_increments_of_a_number_of_events(count, warmup, every):
    first, ends = cut_increments(at(range(count)), warmup, every)
    sizes = [end - start for start, end in zip([first, *ends], ends, strict=False)]
    assert first == int(warmup * count)
    assert sum(sizes) == count - first
    assert set(sizes[:-1]) <= {every}
    assert 1 <= sizes[-1] <= every


def test_increments_begin_at_the_first_event_after_the_warm_up():
    hours = [0, 1, 30, 53, 54, 100]
    first, ends = cut_increments(at([3600 * h for h in hours]), 0.34, "1D")
    # From 30 h on: [30, 54), [54, 78), nothing in [78, 102) but the last one.
    assert (first, ends) == (2, [4, 5, 6])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1D", 86_400),
        ("D", 86_400),
        ("12h", 43_200),
        ("1.5h", 5_400),
        ("30min", 1_800),
        ("2W", 1_209_600),
        ("90 s", 90),
        (7.5, 7.5),
        ("7.5", 7.5),
    ],
)
def test_spans(value, expected):
    assert parse_span("window", value) == expected


@pytest.mark.parametrize(
    "value", ["", "0", "1M", "-1D", "0s", "D1", 0, -1.0, float("inf"), float("nan")]
)
def test_spans_refuse(value):
    with pytest.raises(ConfigError, match="window: expected a number above 0 or a text such as"):
        parse_span("window", value)


def test_increments_refuse():
    for warmup in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="warmup: expected a share"):
            cut_increments(at([1]), warmup, 1)
    with pytest.raises(ConfigError, match="every: expected 1 event or more an increment, got 0"):
        cut_increments(at([1]), 0, 0)
    with pytest.raises(ConfigError, match="every: expected a number above 0 or a text"):
        cut_increments(at([1]), 0, "soon")


def test_rounds_go_through_json():
    one = Round(
        index=3, time=7, num_events=2, num_replayed=1, loss=0.1 + 0.2, ap=1 / 3, train_s=0.5
    )
    again = Round.from_json(one.to_json())
    assert (again.loss, again.ap, again.time) == (one.loss, one.ap, 7)
    assert math.isnan(again.mrr)
    assert one.to_json()["mrr"] is None
    assert one.total_s == 0.5
    with pytest.raises(DataError, match="expected a round with"):
        Round.from_json(one.to_json() | {"extra": 1})


def test_stages_inside_a_stage_count_as_the_outer_one(monkeypatch):
    ticks = iter([1.0, 3.0, 10.0, 14.0])  # of the two outer stages alone
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = StageClock(torch.device("cpu"))
    with clock.stage("evaluate"):
        with clock.stage("sample"):
            pass
        with pytest.raises(KeyError), clock.stage("fetch"):
            raise KeyError
    with clock.stage("train"):
        pass
    taken = clock.take()
    assert (taken["evaluate_s"], taken["train_s"]) == (2, 4)
    assert taken["sample_s"] == taken["fetch_s"] == 0
    assert set(clock.take().values()) == {0.0}


def test_compiling_a_kernel_is_in_no_stage(monkeypatch):
    ticks, compiling = iter([1.0, 13.0, 20.0, 21.0]), iter([5.0, 15.0, 15.0, 15.0])
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(rounds, "compile_s", lambda: next(compiling))
    clock = StageClock(torch.device("cpu"))
    for stage in ("sample", "train"):
        with clock.stage(stage):
            pass
    taken = clock.take()
    assert (taken["sample_s"], taken["train_s"]) == (2, 1)
