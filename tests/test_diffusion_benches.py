"""What diffusionpipe's benchmarks compute by themselves: limits, what counts as the same training, made profiles."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench/diffusionpipe"))

pytest.importorskip("diffusers")

from bench_filling import find_limit
from bench_virtual import Case, judge
from sleepers import fill_as_published, make_profile, without_frozen_part
from small_sd import is_same_training, measure_ratio
from turns import Turns, compare

import diffusionpipe as dp
from shared.topology import Cluster, Link
from shared.topology.device import CPU

FALLING = [1.0, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("ratio", "count", "limit"), [(0.45, 2, 1.30), (0.45, 4, 1.172), (0.05, 4, 1.04), (0.0, 4, 1.0)]
)
def test_the_limit_of_filling_two_stages(ratio, count, limit):
    assert find_limit(ratio, count) == pytest.approx(limit, abs=5e-4)


def test_trainings_are_the_same_only_if_losses_agree_and_fell():
    untrained = (3, 1.0)
    assert is_same_training(FALLING, FALLING, untrained)
    assert is_same_training(FALLING, [*FALLING, 0.6], untrained)
    assert not is_same_training([1.0, 0.9, 0.81, 0.7], FALLING, untrained), "another loss"
    assert not is_same_training([1.0] * 4, [1.0] * 4, untrained), "no weight changed"
    assert not is_same_training([], FALLING, untrained), "does nothing"
    assert not is_same_training(FALLING[:3], FALLING, untrained), "too few steps"
    assert not is_same_training([float("nan")] * 4, FALLING, untrained)


def test_the_ratio_is_that_of_both_ranks_together():
    steps = {
        "frozen part alone": [[1.0, 2.0], [1.0, 2.0], [9.0, 2.0]],
        "trained part alone": [[3.0, 3.0]],
    }
    assert measure_ratio(steps) == pytest.approx(0.5)


def test_seconds_of_a_turn_are_the_slower_ranks():
    turns = Turns({"ours": [[1.0, 2.0], [2.0, 1.0]], "peer": [[3.0, 1.0], [1.0, 5.0]]}, {})
    claim, spread = compare(
        "step", turns.seconds("ours"), turns.seconds("peer"), "peer", correct=True
    )
    assert (claim.ours, claim.baseline, claim.ratio, spread) == (2.0, 4.0, 2.0, (1.5, 2.5))


def test_the_published_form_encodes_every_sample_once_and_keeps_all_passes():
    stages, rows, count = 4, 8, 8
    profile = make_profile(stages, 0.06, 0.4, rows)
    cluster = Cluster.uniform(1, stages, CPU, local=Link(alpha_s=1e-4, beta_s_per_byte=1e-9))
    options = {"num_stages": stages, "num_micro_batches": count, "placement": "chain"}
    plan = dp.plan(None, profile, cluster, batch_size=rows * count, **options)
    published = fill_as_published(plan, profile, rows * count, 1e-3)
    jobs = [a.samples for own in published.order for a in own if a.kind == "encode"]
    assert sorted(row for job in jobs for row in range(*job)) == list(range(rows * count))
    for own in published.order:
        kinds = Counter(action.kind for action in own)
        assert (kinds["forward"], kinds["backward"], kinds["step"]) == (count, count, 1)
    first = dp.plan(None, without_frozen_part(profile), cluster, batch_size=rows * count, **options)
    assert not any(action.kind == "encode" for own in first.order for action in own)
    assert first.predicted_s < published.predicted_s


def test_a_made_profile_has_the_ratio_asked_for():
    for chains in (1, 2):
        profile = make_profile(3, 0.06, 0.4, 8, num_chains=chains)
        trained = sum(
            row[0] for chain in profile.chains for row in (*chain.forward_s, *chain.backward_s)
        )
        assert profile.frozen_s["z"][0] / trained == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("planned", "measured", "is_right"),
    [
        ((1.0, 1.4), (1.0, 1.4), True),
        ((1.0, 1.4), (1.0, 1.06), True),
        # Nothing was filled where the plan fills.
        ((1.0, 1.4), (1.0, 1.0), False),
        # Faster than the limit: nothing slept.
        ((1.0, 1.4), (0.9, 1.4), False),
        # Two backbones on two devices leave no idle time to fill.
        ((1.0, 1.0), (1.0, 1.0), True),
        ((1.0, 1.04), (1.0, 1.005), False),
    ],
)
def test_sleeping_devices_are_right_if_they_sleep_and_gain_what_the_plan_says(
    planned, measured, is_right
):
    """Seconds of a step, filled and with frozen parts first."""
    filled, first = (SimpleNamespace(predicted_s=seconds) for seconds in planned)
    case = Case("a case", None, filled, first, 0.95)
    seconds = {"filled": [measured[0]], "first": [measured[1]]}
    claims = []
    judge(lambda claim, **_: claims.append(claim), [(case, seconds)], "2 stages", "a command")
    assert [claim.correct for claim in claims] == [is_right] * 3
    assert claims[0].ours == pytest.approx(0.95 / measured[0])
    assert claims[1].ours == pytest.approx(100 * abs(1 / measured[0] - 1))
    assert claims[2].ratio == pytest.approx(measured[1] / measured[0])
