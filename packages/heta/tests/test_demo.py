"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

from dataclasses import replace

import pytest
from graphs import WRITES, plan_by_hand, scholars

from heta import demo
from heta.partitioning.workload import StepRates
from heta.training.jobs import comparison as jobs
from heta.training.jobs.comparison import StrategyComparison, Timing
from shared.claims import faults, read_demo
from shared.topology import Link

TINY = demo.Size(days=3, batch_size=512, hidden=8, turns=1, steps_per_turn=2)


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert "<svg" in result.pictures()[0].read_text()


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.usefixtures("template")
def test_strategies_train_alike_and_send_what_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SHORT", TINY)
    monkeypatch.setattr(demo.netlab, "available", lambda: "not in this test")
    monkeypatch.setattr(jobs, "measure_rates", StepRates)
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    names = {claim.name for claim in result.claims}
    assert "bytes sent in a step beside the plan's" in names
    assert not any("seconds" in name for name in names)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, 0),
        ({"losses": [0.7, 0.61]}, 4),
        ({"sent_bytes": 1030.0}, 1),
        ({"auc": 0.69}, 1),
    ],
)
def test_a_claim_is_correct_only_if_its_check_holds(change, wrong):
    same = Timing(losses=[0.7, 0.6], step_s=[0.2], sent_bytes=1000.0, auc=0.7)
    timings = {"raf": replace(same, **change), "replicate": same, "edge-cut": same}
    plan = replace(plan_by_hand(scholars(), [[WRITES]]), sent_bytes=1000.0)
    plans = dict.fromkeys(timings, plan)
    comparison = StrategyComparison(
        plans=plans, timings=timings, alone=same, link=Link(alpha_s=0.0, beta_s_per_byte=0.0)
    )
    claims = demo.claim(comparison, TINY, is_networked=True)
    assert len(claims) == 6
    assert sum(not claim.correct for claim in claims) == wrong
