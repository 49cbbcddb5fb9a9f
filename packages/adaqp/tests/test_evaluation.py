"""Scores against their definitions, pair by pair."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaqp.evaluation import accuracy, auc, micro_f1
from shared.errors import DataError


def test_accuracy_counts_the_largest_logit():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
    assert accuracy(logits, torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert math.isnan(accuracy(logits[:0], torch.zeros(0, dtype=torch.int64)))


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=24))
@settings(max_examples=80, deadline=None)
def test_micro_f1_is_two_hits_over_all_claims(pairs):
    logits = torch.tensor([[float(score)] for score, _ in pairs])
    target = torch.tensor([[float(true)] for _, true in pairs])
    hits = sum(score > 0 and true for score, true in pairs)
    wrong = sum((score > 0) != true for score, true in pairs)
    expected = 2 * hits / (2 * hits + wrong) if hits or wrong else 0.0
    assert micro_f1(logits, target) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_auc_is_the_share_of_pairs_in_order(dtype, rows):
    positive = [score for score, true in rows if true]
    negative = [score for score, true in rows if not true]
    score = torch.tensor([score for score, _ in rows], dtype=dtype)
    label = torch.tensor([true for _, true in rows])
    if not positive or not negative:
        with pytest.raises(DataError, match="label: expected both classes"):
            auc(score, label)
        return
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    assert abs(auc(score, label) - wins / (len(positive) * len(negative))) < 1e-12


def test_auc_refuses_nan():
    with pytest.raises(DataError, match="score of row 1: expected a number, got nan"):
        auc(torch.tensor([0.0, torch.nan]), torch.tensor([0, 1]))
