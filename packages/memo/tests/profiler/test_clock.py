"""Seconds beside other programs: a clock that leaves out what threads waited for a processor."""

from dataclasses import replace

import pytest
import torch

from memo.planner.explanation import describe_disturbance
from memo.planner.plan import Plan
from memo.profiler.clock import Moment, now


@pytest.mark.parametrize(
    ("elapsed_s", "cpu_s", "waited_s", "wanted_s"),
    [
        (1.0, 2.0, 0.0, 1.0),  # an idle machine
        (1.0, 1.2, 0.4, 0.6),  # threads wait one after another
        (1.0, 1.4, 0.9, 0.7),  # threads wait at once, and have computed for more than is left
        (1.0, 2.4, 0.0, 1.0),  # more threads than compute: never longer than what went by
    ],
)
def test_seconds_leave_out_what_threads_waited_for_a_processor(
    elapsed_s, cpu_s, waited_s, wanted_s, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    begun, ended = (
        Moment(3.0, 4.0, 5.0, 6.0),
        Moment(4.0 + elapsed_s, 9.0, 5.0 + cpu_s, 6.0 + waited_s),
    )
    assert ended - begun == pytest.approx(wanted_s)
    assert ended.share_waited(begun) == pytest.approx(waited_s)


def test_the_clock_of_this_process_goes_on():
    begun = now(torch.device("cpu"))
    torch.randn(200, 200) @ torch.randn(200, 200)
    ended = now(torch.device("cpu"))
    assert ended - begun > 0
    assert ended.cpu_s >= begun.cpu_s > 0


@pytest.mark.parametrize(("share", "num_lines"), [("0.02", 0), ("0.45", 1)])
def test_a_plan_says_that_its_machine_was_busy(share, num_lines):
    lines = describe_disturbance({"details": {"busy": share}})
    assert len(lines) == num_lines
    assert all("for 45% of the time" in line for line in lines)
    assert describe_disturbance({}) == []


@pytest.mark.parametrize(("step_s", "is_slower"), [(1.9, False), (2.1, True)])
def test_a_plan_says_that_it_is_slower_than_computing_everything_again(step_s, is_slower):
    times = {"kept_s": 1.0, "recomputed_s": 2.0, "replayed_s": 0.0, "exposed_s": 0.0}
    sizes = {"peak_bytes": 1, "store_bytes": 0, "peak_at": "loss", "parts_bytes": {}}
    plan = replace(Plan.fixed(alpha=0.0), prediction={"step_s": step_s, **times, **sizes})
    assert ("slower    than computing everything again" in plan.explain()) == is_slower
