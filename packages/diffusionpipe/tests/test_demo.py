"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

import pytest

from diffusionpipe import demo
from diffusionpipe.demo import TrainedTurns
from diffusionpipe.planner.plan import Action
from diffusionpipe.runtime.records import RunReport, StepTimes
from shared.claims import faults, read_demo


def make_report(filled_s=0.1, waited_s=0.1):
    steps = tuple(
        tuple(
            StepTimes(step, 0.0, filled_s=filled_s * rank, waited_s=waited_s * (step + rank))
            for step in range(4)
        )
        for rank in (0, 1)
    )
    return RunReport(steps=steps, edges={}, predicted_s=0.0, predicted_edges={})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path, capsys):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert faults(result) == []
    assert len(result.claims) == 3
    assert "<svg" in result.pictures()[0].read_text()
    assert capsys.readouterr().err.count("diffusionpipe: ") >= len(result.claims)


def turns(**changes):
    known = {
        "filled_s": [1.0, 1.2, 1.1],
        "first_s": [1.5, 1.2, 1.32],
        "filled_losses": [0.5, 0.4, 0.3, 0.2],
        "first_losses": [0.5, 0.4, 0.3, 0.2],
        "reference_losses": [0.5, 0.4],
        "reports": (make_report(), make_report()),
    }
    return TrainedTurns(**{**known, **changes})


def test_a_steps_claim_is_the_median_turn_and_right_where_losses_are_one_process():
    claim = demo.judge_training(turns())
    assert (claim.ours, claim.baseline) == (1.1, 1.32)
    assert claim.ratio == pytest.approx(1.2)
    assert claim.correct
    assert not demo.judge_training(turns(reference_losses=[0.51, 0.4])).correct
    assert not demo.judge_training(turns(first_losses=[0.5, 0.4, 0.31, 0.2])).correct


def test_a_run_that_does_nothing_is_not_right():
    """Weights that stay give other losses from the second step on; no frozen part takes no time."""
    assert not demo.judge_training(turns(filled_losses=[0.5, 0.41, 0.3, 0.2])).correct
    same = [0.5, 0.41, 0.3, 0.2]
    assert not demo.judge_training(turns(filled_losses=same, first_losses=same)).correct
    for reports in ((make_report(0), make_report()), (make_report(), make_report(0))):
        assert not demo.judge_training(turns(reports=reports)).correct


def test_waits_are_the_sum_of_both_ranks_in_each_step_but_the_first():
    claim = demo.judge_waits(turns(reports=(make_report(), make_report(waited_s=0.3))))
    assert (claim.ours, claim.baseline) == pytest.approx((0.5, 1.5))
    assert claim.ratio == pytest.approx(3)
    assert claim.correct
    assert not demo.judge_waits(turns(first_losses=[0.5, 0.4, 0.31, 0.2])).correct
    assert not demo.judge_waits(turns(reports=(make_report(), make_report(waited_s=0)))).correct


def test_sleeping_devices_are_right_if_no_step_is_shorter_than_planned():
    claim = demo.judge_sleeping([1.0, 1.02], [1.4, 1.5], 0.9)
    assert claim.correct
    assert claim.ratio == pytest.approx((1.4 + 1.5 / 1.02) / 2)
    assert "off by 12.2%" in claim.detail
    assert not demo.judge_sleeping([0.8, 1.02], [1.4, 1.5], 0.9).correct
    assert not demo.judge_sleeping([0.0, 0.0], [1.4, 1.5], 0.9).correct


def test_frozen_parts_first_are_even_shares_before_all_passes():
    from diffusionpipe.planner.costs import PlanInputs
    from diffusionpipe.planner.search.assembly import assemble
    from diffusionpipe.planner.search.search import plan as make_plan

    profile, cluster = demo.describe_sleepers(), demo.make_cluster(4)
    filled = make_plan(
        None, profile, cluster, batch_size=64, num_stages=4,
        num_micro_batches=4, placement="chain",
    )  # fmt: skip
    first = assemble(filled, PlanInputs(profile, cluster), "first")
    for rank, (ours, theirs) in enumerate(zip(first.order, filled.order, strict=True)):
        assert ours[0] == Action("encode", name="z", samples=(16 * rank, 16 * (rank + 1)))
        assert ours[1:] == tuple(action for action in theirs if action.kind != "encode")
    assert any("encode" in [a.kind for a in own[3:]] for own in filled.order)
