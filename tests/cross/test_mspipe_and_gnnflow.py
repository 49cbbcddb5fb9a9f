"""What mspipe and gnnflow both have is the same: metrics, and streams of events."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gnnflow.data
import gnnflow.evaluation
import mspipe.data
from mspipe import metrics
from shared.errors import DataError

scores = st.floats(-4, 4, width=16)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_metrics(num_events, num_negatives, data):
    pos = data.draw(st.lists(scores, min_size=num_events, max_size=num_events))
    own = st.lists(scores, min_size=num_negatives, max_size=num_negatives)
    neg = data.draw(st.lists(own, min_size=num_events, max_size=num_events))
    theirs = gnnflow.evaluation
    for others in (neg, neg[0]):
        assert metrics.mrr(pos, others) == theirs.mrr(pos, others)
        assert metrics.hits(pos, others, 3) == theirs.hits(pos, others, 3)
        assert math.isclose(metrics.auc(pos, others), theirs.auc(pos, others))
        assert metrics.average_precision(pos, others) == theirs.average_precision(pos, others)


def test_flights():
    try:
        ours, theirs = mspipe.data.flights(), gnnflow.data.flights()
    except DataError as error:
        pytest.skip(str(error))
    for name in ("src", "dst", "t", "eid", "features"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.label == theirs.label


@pytest.mark.parametrize(("num_nodes", "exponent"), [(2, 1.0), (300, 0.0), (5000, 1.3)])
def test_zipf(num_nodes, exponent):
    ours = mspipe.data.zipf(num_nodes, 2000, 4, exponent=exponent, edge_dim=2)
    theirs = gnnflow.data.zipf(num_nodes, 2000, 4, exponent=exponent)
    for name in ("src", "dst", "t", "eid"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.label == theirs.label
