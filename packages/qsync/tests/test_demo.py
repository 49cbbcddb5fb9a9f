"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

import os
from dataclasses import replace

import pytest

from qsync import Plan, demo
from qsync.demo import RankRecord, TurnRecord
from qsync.planner.plan import RankPlan
from shared.claims import faults, read_demo
from shared.comms.handicap import HandicapUnavailable

OPERATORS = {"a": "Linear 2x2", "b": "Linear 2x2"}
SLOW = RankPlan(lowered={"b": "bf16"}, noise=1e-4)
PLAN = Plan(operators=OPERATORS, ranks=(RankPlan(lowered={}, noise=0.0), SLOW), step_s=0.6)


def record(planned_s, float32_s, busy_s, losses=(1.3, 1.2)):
    """A rank that computes for `busy_s` seconds of each of two steps."""

    def repeat(step_s, losses):
        return TurnRecord([step_s] * 2, [step_s - 0.1] * 2, [busy_s] * 2, list(losses))

    return RankRecord(
        plan=PLAN,
        plan_s=1.0,
        float32=repeat(float32_s, (1.3, 1.2)),
        planned=repeat(planned_s, losses),
        noise=1.2e-4,
        uniform_noise=1.08e-2,
    )


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_a_plan_and_a_picture(tmp_path, capsys):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert faults(result) == []
    assert "<svg" in result.pictures()[0].read_text()
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.ranks) in (2, 3)
    assert capsys.readouterr().err.count("qsync: ") >= len(result.claims)


def test_claims_are_the_steps_and_waits_that_ranks_measured():
    step, prediction, wait, loss, error = demo.judge(
        [record(0.6, 0.8, 0.5), record(0.7, 0.9, 0.55)], "slow"
    )
    assert (step.ours, step.baseline) == (0.6, 0.8)
    assert step.ratio == pytest.approx(0.8 / 0.6)
    # What the plan predicted, beside what the rank took whose backward pass ended last.
    assert (prediction.ours, prediction.baseline) == (0.6, pytest.approx(0.6))
    assert prediction.baseline_name == "measured"
    assert wait.ours == pytest.approx(0.1)
    assert wait.baseline == pytest.approx(0.3)
    assert loss.ours == loss.baseline == 1.2
    assert error.ratio == pytest.approx(9.4868, rel=1e-3)
    assert all(claim.correct for claim in (step, prediction, wait, loss, error))
    assert "1 of its 2 operators" in step.detail


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, []),
        ({"planned": TurnRecord([0.6] * 2, [0.5] * 2, [0.5] * 2, [1.3, 1.26])}, [0, 2, 3]),
        ({"planned": TurnRecord([2.0] * 2, [1.9] * 2, [0.5] * 2, [1.3, 1.2])}, [1]),
        ({"noise": 3.1e-4}, [4]),
        ({"noise": 0.3e-4}, [4]),
        ({"noise": 0.0}, [4]),
        ({"noise": float("nan")}, [4]),
    ],
)
def test_a_claim_is_correct_only_if_its_check_holds(change, wrong):
    ranks = [record(0.6, 0.8, 0.5), replace(record(0.6, 0.8, 0.55), **change)]
    claims = demo.judge(ranks, "slow")
    assert [index for index, claim in enumerate(claims) if not claim.correct] == wrong


def test_a_rank_that_lowers_nothing_must_have_no_error():
    float32 = replace(PLAN, ranks=PLAN.ranks[:1] * 2)
    last = replace(record(0.8, 0.8, 0.7), plan=float32, noise=0.0)
    claims = demo.judge([last, last], "slow")
    assert [claim.correct for claim in claims] == [True] * 4
    assert not demo.judge([last, replace(last, noise=1e-12)], "slow")[4].correct


def test_two_slow_ranks_share_a_core_where_shares_need_root(monkeypatch):
    def refuse(*, share=None, cores=(), isa=None):
        if share is not None:
            raise HandicapUnavailable("needs root")
        return ["taskset", str(isa), *map(str, cores)]

    monkeypatch.setattr(demo, "handicap", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 2})
    prefixes, slow = demo.choose_ranks()
    assert prefixes == [["taskset", "AVX512", "1"], *[["taskset", "None", "3"]] * 2]
    assert slow == "two share a core"
