"""Scores against their definitions, pair by pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaqp.training.evaluation import auc
from shared.errors import DataError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=60)
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
