"""The history of claims: what is appended, which runs count, how a ratio is printed."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from history import (
    ClaimRun,
    Series,
    append_history,
    current_series,
    format_number,
    read_history,
)


def run_of(**changes):
    run = ClaimRun(
        package="zeta",
        benchmark="tiny",
        revision=1,
        name="a sum",
        unit="s",
        ours=1.0,
        baseline=2.0,
        baseline_name="a loop",
        higher_is_better=False,
        ratio=2.0,
        spread=None,
        correct=True,
        kind="measured",
        aim=None,
        detail="",
        source="",
        command="hatch run bench zeta",
        commit="0123456789",
        date="2026-01-02T03:04+00:00",
        machine="a machine",
        versions={"torch": "2"},
    )
    return replace(run, **changes)


def test_history_returns_what_was_appended(tmp_path):
    path = tmp_path / "results/history.jsonl"
    assert read_history(path) == []
    first, second = run_of(spread=(1.5, 2.5)), run_of(ratio=None, baseline=None)
    append_history(path, [first])
    append_history(path, [second])
    assert read_history(path) == [first, second]


def test_appended_runs_are_on_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / "history.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    append_history(path, [run_of()])
    assert [(one.st_ino, one.st_size) for one in synced] == [
        (path.stat().st_ino, path.stat().st_size)
    ]


def test_a_ratio_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "history.jsonl"
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_history(path, [run_of(), run_of(ratio=float("nan"))])
    assert read_history(path) == []


@pytest.mark.parametrize(
    ("line", "message"), [("{", "expected JSON"), ('{"package": "zeta"}', "missing .*'aim'")]
)
def test_a_line_that_is_no_run_is_named(tmp_path, line, message):
    path = tmp_path / "history.jsonl"
    append_history(path, [run_of()])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"history.jsonl:2: .*{message}"):
        read_history(path)


def test_runs_count_until_the_revision_rises():
    old = [run_of(ratio=9.0), run_of(name="another")]
    elsewhere = run_of(benchmark="other", ratio=5.0)
    assert [len(one.runs) for one in current_series([*old, run_of(), elsewhere])] == [2, 1, 1]
    found = current_series([*old, run_of(revision=2), elsewhere, run_of(revision=2, ratio=4.0)])
    assert [one.title for one in found] == ["a sum against a loop"] * 2
    assert [one.ratios for one in found] == [[2.0, 4.0], [5.0]]


def test_newest_run_is_the_one_of_the_latest_date():
    later, earlier = run_of(ratio=3.0, date="2026-02-01T00:00+00:00"), run_of()
    (found,) = current_series([later, earlier])
    assert (found.newest, found.ratios) == (later, [2.0, 3.0])


def test_claims_of_one_name_are_told_apart_by_their_baselines():
    found = current_series([run_of(), run_of(baseline_name="numpy"), run_of(ratio=3.0)])
    assert [one.ratios for one in found] == [[2.0, 3.0], [2.0]]


def test_a_baseline_that_the_run_picks_stays_one_claim_whichever_it_picks():
    picks = [run_of(baseline_name=f"the fastest peer: {name}") for name in ("a loop", "numpy")]
    (found,) = current_series(picks)
    assert found.runs == tuple(picks)
    assert found.title == "a sum against the fastest peer: numpy"


def test_runs_that_named_the_pick_alone_are_of_the_claim_that_names_it_behind_a_colon(tmp_path):
    path = tmp_path / "history.jsonl"
    place = {"package": "swift", "benchmark": "step"}
    append_history(path, [run_of(**place, baseline_name=name) for name in ("DDP", "DDP, 8 MB")])
    append_history(path, [run_of(**place, baseline_name="the faster DDP: buckets of 8 MB")])
    append_history(path, [run_of(**place, baseline_name="DDP and a warm snapshot")])
    found = current_series(read_history(path))
    assert [len(one.runs) for one in found] == [3, 1]


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([run_of(ratio=2.814)], "2.81x (1 run)"),
        ([run_of(spread=(1.5, 2.5))], "2.00x (1.50-2.50, 1 run)"),
        (
            [run_of(ratio=r) for r in (3.3, 2.62, 2.81, 2.8149)],
            "2.81x (2.62-3.30, 4 runs)",
        ),
        ([run_of(), run_of(machine="b")], "2.00x (2.00-2.00, 2 runs on 2 machines)"),
        ([run_of(), run_of(ratio=None)], "2.00x (2.00-2.00, 2 runs, 1 not finite)"),
        ([run_of(), run_of(correct=False)], "2.00x (2.00-2.00, 2 runs, 1 NOT CORRECT)"),
        ([run_of(ratio=None)], "not finite"),
    ],
)
def test_ratio_is_the_median_with_the_range(runs, text):
    assert Series(tuple(runs)).ratio_text() == text


def test_outcome_counts_misses_and_wrong_runs():
    good, missed = run_of(aim=2.0), run_of(aim=2.0, ratio=1.9)
    wrong = replace(good, correct=False)
    assert Series((run_of(),)).outcome() == "correct"
    assert Series((good,)).outcome() == "correct; aim 2x met"
    assert Series((missed,)).outcome() == "correct; aim 2x MISSED"
    assert Series((missed, good, wrong)).outcome() == (
        "NOT CORRECT in 1 of 3 runs; aim 2x MISSED in 1 of 3 runs"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (0.00123, "0.00123"),
        (0.000999, "9.99e-04"),
        (0.00001234, "1.23e-05"),
        (2.0, "2.00"),
        (99.96, "100"),
        (370.7, "371"),
        (999.6, "1,000"),
        (48_213, "48,200"),
        (-1.5, "-1.50"),
        (12_345_678, "1.23e+07"),
        (None, "not finite"),
    ],
)
def test_three_significant_digits(value, text):
    assert format_number(value) == text
