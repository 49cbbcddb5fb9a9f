"""Ranking metrics against their definitions, counted out, and against scikit-learn and TGB's form."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data import metrics
from shared.errors import ConfigError, DataError

scores = st.sampled_from([float("-inf"), -1.0, 0.0, 0.5, 1.0, float("inf")])
some = st.lists(scores, min_size=1, max_size=12)


def rank(score, others):
    better = sum(other > score for other in others)
    return 1 + better + sum(other == score for other in others) / 2


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranking_counts_ties_by_half(num_events, num_negatives, data):
    pos = data.draw(st.lists(scores, min_size=num_events, max_size=num_events))
    own = st.lists(scores, min_size=num_negatives, max_size=num_negatives)
    neg = data.draw(st.lists(own, min_size=num_events, max_size=num_events))
    ranks = [rank(*pair) for pair in zip(pos, neg, strict=True)]
    assert metrics.mrr(pos, neg) == pytest.approx(np.mean([1 / r for r in ranks]))
    for k in range(1, num_negatives + 2):
        assert metrics.hits(pos, neg, k) == pytest.approx(np.mean([r <= k for r in ranks]))
    shared = [rank(score, neg[0]) for score in pos]
    assert metrics.mrr(pos, neg[0]) == pytest.approx(np.mean([1 / r for r in shared]))
    assert metrics.hits(pos, neg[0], 1) == pytest.approx(np.mean([r <= 1 for r in shared]))


def test_ranking_equals_the_benchmarks_evaluator():
    # The evaluator of py-tgb 2.0, restated; it works in float32.
    draw = torch.Generator().manual_seed(0)
    pos = torch.randint(0, 20, (300,), generator=draw).float()
    neg = torch.randint(0, 20, (300, 50), generator=draw).float()
    y_pred_pos = pos.reshape(-1, 1)
    optimistic_rank = (neg > y_pred_pos).sum(dim=1)
    pessimistic_rank = (neg >= y_pred_pos).sum(dim=1)
    ranking_list = 0.5 * (optimistic_rank + pessimistic_rank) + 1
    mrr = (1.0 / ranking_list.to(torch.float)).mean()
    hits = (ranking_list <= 10).to(torch.float).mean()
    assert metrics.mrr(pos, neg) == pytest.approx(float(mrr), rel=1e-6)
    assert metrics.hits(pos, neg, 10) == pytest.approx(float(hits), rel=1e-6)


@given(some, some)
def test_auc_counts_pairs(pos, neg):
    wins = [(p > n) + (p == n) / 2 for p in pos for n in neg]
    assert metrics.auc(pos, neg) == pytest.approx(np.mean(wins))


@given(some, some)
def test_average_precision_sums_over_thresholds(pos, neg):
    total, last_recall = 0.0, 0.0
    for threshold in sorted({*pos, *neg}, reverse=True):
        hit = sum(p >= threshold for p in pos)
        recall = hit / len(pos)
        total += (recall - last_recall) * hit / (hit + sum(n >= threshold for n in neg))
        last_recall = recall
    assert metrics.average_precision(pos, neg) == pytest.approx(total)


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_equals_scikit_learn(decimals):
    theirs = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn's metrics")
    random = np.random.default_rng(0)
    pos = random.normal(0.5, 1, 500).round(decimals)
    neg = random.normal(0, 1, 700).round(decimals)
    label, score = np.arange(1200) < 500, np.concatenate([pos, neg])
    assert metrics.auc(pos, neg) == pytest.approx(theirs.roc_auc_score(label, score))
    assert metrics.average_precision(pos, neg) == pytest.approx(
        theirs.average_precision_score(label, score)
    )


def test_extremes():
    assert metrics.mrr([2.0], [[1.0, 0.0]]) == 1
    assert metrics.mrr([0.0], [[1.0] * 9]) == 0.1
    assert metrics.average_precision([2.0, 3.0], [1.0]) == metrics.auc([2.0], [1.0]) == 1
    assert metrics.auc([0.0], [1.0]) == 0
    # All scores alike say nothing.
    assert metrics.auc([1.0] * 3, [1.0] * 5) == 0.5
    assert metrics.average_precision([1.0] * 3, [1.0] * 5) == pytest.approx(3 / 8)
    assert metrics.mrr([1.0], [[1.0]]) == pytest.approx(1 / 1.5)
    assert metrics.hits([float("inf")], [[float("-inf")]], 1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_takes_tensors_of_any_type_and_with_gradients(dtype):
    pos = torch.tensor([3, 1], dtype=dtype)
    neg = torch.tensor([[2, 0], [2, 2]], dtype=dtype)
    if dtype.is_floating_point:
        pos.requires_grad_()
    assert metrics.mrr(pos, neg) == pytest.approx((1 + 1 / 3) / 2)
    assert metrics.auc(pos, neg) == pytest.approx(5 / 8)


@pytest.mark.parametrize(
    ("pos", "neg", "message"),
    [
        ([], [[1.0]], "pos: expected at least one score"),
        ([1.0], [[]], "neg: expected at least one score"),
        ([1.0], [0.0, float("nan"), 2.0], r"neg: expected numbers, got NaN at \[1\]"),
        ([1.0, 2.0], [[1.0]], r"got \[2\] and \[1, 1\]"),
        ([[1.0]], [1.0], r"got \[1, 1\] and \[1\]"),
        (["a"], [1.0], "pos: expected numbers, got <U1"),
    ],
)
def test_ranking_refuses(pos, neg, message):
    with pytest.raises(DataError, match=message):
        metrics.mrr(pos, neg)


def test_others_refuse():
    with pytest.raises(DataError, match="neg: expected at least one score"):
        metrics.auc([1.0], [])
    with pytest.raises(DataError, match="pos: expected numbers, got NaN"):
        metrics.average_precision([float("nan")], [1.0])
    with pytest.raises(ConfigError, match="expected k of 1 or more, got 0"):
        metrics.hits([1.0], [1.0], 0)


def test_infinite_scores_tie():
    assert metrics.average_precision([np.inf], [np.inf]) == 0.5
    assert metrics.auc([np.inf, -np.inf], [-np.inf]) == 0.75


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_takes_truth_values(kind):
    pos, neg = kind([True, False]), kind([[False, False], [True, False]])
    assert metrics.mrr(pos, neg) == pytest.approx((1 + 1 / 2.5) / 2)
    assert metrics.auc(pos, neg) == pytest.approx((3 + 0.5 + 1.5) / 8)


def test_float64_is_kept():
    """Scores that float32 would tie."""
    low, high = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert metrics.auc(high[None], low[None]) == metrics.mrr(high[None], low[None]) == 1
    assert metrics.auc(low[None], high[None]) == 0
