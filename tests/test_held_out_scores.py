"""What adaqp's benchmarks say of accuracy: planted scores, and a policy that sends nothing."""

import sys
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

sys.path.insert(0, str(Path(__file__).parents[1] / "bench/adaqp"))

from held_out_scores import gap

EXACT = [0.70, 0.71, 0.69, 0.70]


def scores(differences, exact=EXACT):
    ours = [(one + points / 100, 0.9) for one, points in zip(exact, differences, strict=False)]
    return {"exact": [(one, 0.9) for one in exact], "ours": ours}


def test_the_interval_is_students():
    differences = [0.1, -0.2, 0.3, -0.1]
    found = gap(scores(differences), "ours")
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(low)
    assert found.mean + found.half == pytest.approx(high)
    assert (found.score, found.exact) == pytest.approx((70.025, 70.0))


@pytest.mark.parametrize(
    ("differences", "is_kept", "is_lost"),
    [
        ([0.0, 0.1, -0.1, 0.0], True, False),
        ([-0.2, -0.2, -0.25, -0.15], True, False),
        # Within 0.3 points on average, and nobody knows whether it is.
        ([-1.0, 0.9, -0.6, 0.5], False, False),
        ([-0.4, -0.4, -0.45, -0.35], False, False),
        ([-5.0, -5.5, -4.5], False, True),
        ([-3.1, -9.0, -1.0], False, False),
    ],
)
def test_only_a_whole_interval_counts(differences, is_kept, is_lost):
    found = gap(scores(differences), "ours")
    assert (found.is_kept, found.is_lost) == (is_kept, is_lost)


def test_what_equals_dropped_messages_is_not_kept():
    """A run that sends nothing loses what the control loses."""
    planted = scores([-4.0, -5.0, -4.5])
    assert gap(planted, "ours").is_lost
    assert not gap(planted, "ours").is_kept


def test_columns_are_accuracy_and_auc():
    planted = scores([-4.0, -5.0, -4.5])
    assert gap(planted, "ours", 1).mean == 0
