"""The latest start of a fetch, beside the formula worked out by hand."""

import time

import pytest

from mspipe.pipeline.report import Report, Span
from mspipe.pipeline.stale_schedule import Schedule
from mspipe.planner import STAGES


def report_of(*seconds):
    """Two iterations with these seconds for each stage."""
    report = Report(mode="stale")
    for iteration in range(2):
        for stage, stage_s in zip(STAGES, seconds, strict=True):
            report.spans.append(Span(stage, iteration, 10.0, 10.0 + stage_s))
    return report


@pytest.mark.parametrize(
    ("seconds", "after_start_s"),
    [
        # Fetched just before the previous training ends, 3 of 10 s each.
        ((1.0, 2.0, 3.0, 10.0, 1.0), 10 - 3 - 0.05 * 3),
        # The link has to serve this fetch and the next iteration's features and memory: 6 + 2 * 4.
        ((1.0, 6.0, 4.0, 5.0, 1.0), 5 + 5 - 6 - 2 * 4 - 0.05 * 4),
    ],
)
def test_a_fetch_starts_as_late_as_training_and_the_link_permit(
    monkeypatch, seconds, after_start_s
):
    schedule = Schedule(None)
    assert schedule.latest_s(0) == 0.0
    schedule.observe(report_of(*seconds))
    assert schedule.latest_s(0) == 0.0  # nothing has been trained yet
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    schedule.note_start(4)
    assert schedule.latest_s(5) == pytest.approx(100 + after_start_s)
    train_s = seconds[3]
    assert schedule.latest_s(6) == pytest.approx(100 + train_s + after_start_s)
