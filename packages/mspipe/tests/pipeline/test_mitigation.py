"""Similar nodes against Jaccard's measure counted out, and the fitted weight against its closed form."""

import numpy as np
import pytest
import torch

from mspipe.data.events import Events
from mspipe.memory.row_layout import State
from mspipe.pipeline.mitigation import Mitigation, similar_nodes
from shared.errors import ConfigError


def test_similar_nodes_met_the_same_others():
    draw = np.random.default_rng(0)
    # Three groups whose members choose among the same twelve others.
    src = draw.integers(0, 30, 3000)
    dst = 30 + 12 * (src % 3) + draw.integers(0, 12, 3000)
    found = similar_nodes(Events(src, dst, np.arange(3000)), 5)
    assert found.shape == (66, 5)
    sets = [set(dst[src == node]) | set(src[dst == node]) for node in range(66)]
    for node in range(30):
        others = [other for other in found[node].tolist() if other >= 0]
        assert node not in others
        assert len(set(others)) == len(others)
        assert all(other % 3 == node % 3 for other in others)
        shares = [len(sets[node] & sets[o]) / len(sets[node] | sets[o]) for o in others]
        assert min(shares, default=1) > 0.5
    assert (found[:30] >= 0).float().mean() > 0.9


def test_nodes_without_events_are_similar_to_none():
    found = similar_nodes(Events([0, 5], [2, 2], [0, 1]), 3)
    assert found[[1, 3, 4]].tolist() == [[-1] * 3] * 3
    assert found[0].tolist() == [5, -1, -1]
    assert similar_nodes(Events([], [], []), 3).shape == (0, 3)


def test_the_stalest_roots_are_mixed_with_what_is_fresher():
    events = Events([0, 1, 2, 3], [9, 9, 9, 9], [0, 1, 2, 3])
    mitigation = Mitigation(events, 3, quantile=0.5, weight=0.75)
    nodes = torch.tensor([0, 1, 2, 9, 200])
    is_root = torch.tensor([True, True, True, False, True])
    stale, asked = mitigation.asked(nodes, is_root, torch.tensor([9.0, 1.0, 2.0, 99.0, 99.0]))
    assert stale.tolist() == [0]
    assert set(asked[0].tolist()) == {1, 2, 3}
    others = State(
        torch.tensor([[1.0, 1.0], [5.0, 5.0], [7.0, 7.0]]),
        torch.tensor([4.0, 6.0, 8.0]).double(),
        torch.zeros(3, 0),
        torch.zeros(3),
    )
    own, times = torch.zeros(1, 2), torch.tensor([5.0]).double()
    mix, is_mixed, mean = mitigation.mixed(own, times, others, torch.ones(1, 3, dtype=torch.bool))
    assert mean.tolist() == [[6, 6]]
    assert mix.tolist() == [[1.5, 1.5]]
    assert is_mixed.tolist() == [True]
    mix, is_mixed, _ = mitigation.mixed(own, times + 9, others, torch.ones(1, 3, dtype=torch.bool))
    assert (mix.tolist(), is_mixed.tolist()) == ([[0, 0]], [False])
    none = mitigation.asked(nodes[:0], is_root[:0], torch.empty(0))
    assert len(none[0]) == 0


def test_the_weight_is_the_one_that_comes_closest():
    mitigation = Mitigation(Events([0], [1], [2]), decay=0.0)
    assert mitigation.weight == 1.0
    draw = torch.Generator().manual_seed(0)
    stale, mean = torch.randn(2, 50, 4, generator=draw).unbind()
    fresh = 0.3 * stale + 0.7 * mean + 0.01 * torch.randn(50, 4, generator=draw)
    mitigation.fit(stale, mean, fresh)
    assert mitigation.weight == pytest.approx(0.3, abs=0.01)
    weights = torch.linspace(0, 1, 201)
    errors = [float((w * stale + (1 - w) * mean - fresh).square().sum()) for w in weights]
    assert mitigation.weight == pytest.approx(float(weights[int(np.argmin(errors))]), abs=0.005)
    mitigation.fit(stale, mean, 2 * stale - mean)
    assert mitigation.weight == 1.0
    mitigation.fit(stale, stale, fresh)  # a denominator of nothing
    assert mitigation.weight == 1.0


def test_settings_that_make_no_sense():
    events = Events([0], [1], [2])
    for settings, told in (
        ({"num_similar": 0}, "num_similar of at least 1"),
        ({"quantile": 1.0}, "quantile and decay"),
        ({"decay": -0.1}, "quantile and decay"),
        ({"weight": 1.5}, "weight: expected a share"),
    ):
        with pytest.raises(ConfigError, match=told):
            Mitigation(events, **settings)
