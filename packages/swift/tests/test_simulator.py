"""Simulated trainings, against failures followed by hand and closed forms."""

import math

import numpy as np
import pytest

from shared.errors import ConfigError
from swift.simulator import (
    Recovery,
    Training,
    choose_interval,
    compare,
    draw_failures,
    simulate,
)


def test_without_failures_only_steps_and_checkpoints_take_time():
    found = simulate(
        Training(num_steps=10, step_s=2, checkpoint_s=3, interval=4), Recovery(outage_s=9), []
    )
    # Checkpoints before steps 4 and 8.
    assert (found.total_s, found.checkpoint_s, found.num_failures) == (26, 6, 0)
    assert (found.outage_s, found.repeated_s) == (0, 0)


@pytest.mark.parametrize(
    ("failures", "repeat_step_s", "expected"),
    [
        # In step 2 (4 to 6), half done: 1 s is lost, 5 s outage, then the step again.
        ([5.0], 0.0, (26.0, 1, 5.0, 1.0)),
        # The same, with two steps since the start repeated in 1.5 s each.
        ([5.0], 1.5, (29.0, 1, 5.0, 4.0)),
        # The second comes in the outage, 3 s after the first: it begins anew.
        ([5.0, 8.0], 1.5, (32.0, 2, 8.0, 4.0)),
        # The second comes 2 s into the repetition of 3 s.
        ([5.0, 12.0], 1.5, (36.0, 2, 10.0, 6.0)),
        # Exactly as the repetition ends: the step has not begun, and all is repeated again.
        ([5.0, 13.0], 1.5, (37.0, 2, 10.0, 7.0)),
        # Later than the end: it is never met.
        ([100.0], 1.5, (20.0, 0, 0.0, 0.0)),
        # As a step ends: the step counts.
        ([6.0], 0.0, (25.0, 1, 5.0, 0.0)),
    ],
)
def test_failures_followed_by_hand(failures, repeat_step_s, expected):
    recovery = Recovery(outage_s=5, repeat_step_s=repeat_step_s)
    found = simulate(Training(num_steps=10, step_s=2), recovery, failures)
    got = (found.total_s, found.num_failures, found.outage_s, found.repeated_s)
    assert got == pytest.approx(expected)


def test_a_checkpoint_that_is_cut_off_does_not_count():
    # Steps 0..3 end at 8; the checkpoint of 3 s fails at 9. All four steps are repeated, then it is
    # written again.
    training = Training(num_steps=6, step_s=2, checkpoint_s=3, interval=4)
    found = simulate(training, Recovery(outage_s=1, repeat_step_s=2), [9.0])
    assert found.total_s == pytest.approx(9 + 1 + 8 + 3 + 4)
    assert found.checkpoint_s == pytest.approx(4)
    # One that fails after it repeats nothing but the step.
    later = simulate(training, Recovery(outage_s=1, repeat_step_s=2), [12.0])
    assert later.total_s == pytest.approx(12 + 1 + 4)


def test_checkpoints_take_what_dalys_formula_says():
    """E = M e^(R/M) (e^((t + C)/M) - 1) for a segment of t s of work, its checkpoint C, restart R."""
    work, checkpoint, restart, mtbf = 40.0, 4.0, 6.0, 60.0
    training = Training(num_steps=10**5, step_s=2, checkpoint_s=checkpoint, interval=20)
    # Daly's restart repeats the work at the same rate, interrupted or not.
    total = simulate(
        training, Recovery(outage_s=restart, repeat_step_s=2), draw_failures(mtbf, 1, 5)
    )
    segments = 10**5 / 20
    expected = (
        segments * mtbf * math.exp(restart / mtbf) * (math.exp((work + checkpoint) / mtbf) - 1)
    )
    assert total.total_s == pytest.approx(expected, rel=0.03)


def test_failures_come_as_often_as_said():
    times = draw_failures(100.0, 4, 1)
    gaps = np.diff([0.0, *(next(times) for _ in range(4000))])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(25, rel=0.05)
    assert gaps.std() == pytest.approx(25, rel=0.08)
    again, other = draw_failures(100.0, 4, 1), draw_failures(100.0, 4, 2)
    assert next(again) == gaps[0] != next(other)


@pytest.mark.parametrize("repeat_step_s", [1.0, 0.7])
def test_the_interval_is_near_the_best_of_all(repeat_step_s):
    recovery = Recovery(outage_s=5, repeat_step_s=repeat_step_s)
    chosen = choose_interval(1.0, 4.0, 1500.0, recovery, 10**6)
    assert chosen == round(math.sqrt(2 * 4 * 1500 / repeat_step_s))

    def mean_s(interval):
        training = Training(num_steps=20_000, step_s=1, checkpoint_s=4, interval=interval)
        runs = [simulate(training, recovery, draw_failures(1500.0, 1, seed)) for seed in range(6)]
        return np.mean([run.total_s for run in runs])

    best = min(mean_s(round(chosen * factor)) for factor in (0.25, 0.5, 0.7, 1.4, 2, 4))
    assert mean_s(chosen) <= 1.01 * best


def test_replicas_need_no_checkpoints_and_intervals_have_ends():
    assert choose_interval(1.0, 4.0, 100.0, Recovery(outage_s=1), 50) is None
    assert choose_interval(1.0, 4.0, 1e9, Recovery(outage_s=1, repeat_step_s=1), 50) == 50
    assert choose_interval(1.0, 0.0, 10.0, Recovery(outage_s=1, repeat_step_s=1), 50) == 1


def test_ways_are_compared_under_the_same_failures():
    training = Training(num_steps=3000, step_s=1, checkpoint_s=5)
    ways = {
        "replica": Recovery(outage_s=1),
        "replay": Recovery(outage_s=3, repeat_step_s=0.7),
        "checkpoint": Recovery(outage_s=30, repeat_step_s=1),
    }
    found = compare(training, ways, 128 * 400.0, 128, range(3))
    means = {name: np.mean([run.total_s for run in runs]) for name, (_, runs) in found.items()}
    assert 3000 < means["replica"] < means["replay"] < means["checkpoint"]
    assert found["replica"][0] is None
    assert found["checkpoint"][0] == round(math.sqrt(2 * 5 * 400))
    assert all(len(runs) == 3 for _, runs in found.values())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Training(num_steps=0, step_s=1), "got 0, 1 and 0.0"),
        (lambda: Training(num_steps=1, step_s=0), "got 1, 0 and"),
        (lambda: Training(num_steps=1, step_s=1, checkpoint_s=-1), "got 1, 1 and -1"),
        (lambda: Training(num_steps=1, step_s=1, interval=0), "at least one step, got 0"),
        (lambda: Recovery(outage_s=-1), "at least 0, got -1"),
        (lambda: Recovery(outage_s=0, repeat_step_s=-2), "got 0 and -2"),
        (lambda: next(draw_failures(0, 1, 0)), "mtbf_s above 0 and at least one machine, got 0"),
        (lambda: next(draw_failures(1, 0, 0)), "got 1 and 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
