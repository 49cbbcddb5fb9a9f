"""Strategies by their published numbers, and plans of layers by exhaustive search."""

import itertools

import numpy as np
import pytest

import hydraulis as hy
from hydraulis.planner.galvatron import plan_layers
from shared.errors import ConfigError


def test_eight_devices_have_34_strategies_and_22_after_pruning():
    assert len(hy.galvatron.strategies(8, is_pruned=False)) == 34
    found = hy.galvatron.strategies(8)
    assert len(found) == len(set(found)) == 22
    for one in found:
        degrees = [degree for _, degree in one.levels]
        assert one.pp * np.prod(degrees, dtype=int) == 8
        assert not {"dp", "sdp"} <= {kind for kind, _ in one.levels}
    assert str(hy.galvatron.ParallelStrategy(pp=2, levels=(("dp", 2), ("tp", 2)))) == "pp2-dp2-tp2"


def test_other_numbers_of_devices_are_refused():
    with pytest.raises(ConfigError, match="power of two of devices, got 6"):
        hy.galvatron.strategies(6)


@pytest.mark.parametrize("seed", range(12))
def test_layers_are_planned_as_by_exhaustive_search(seed):
    draw = np.random.default_rng(seed)
    layers, count = 6, 3
    seconds, memory = draw.random((layers, count)), draw.integers(1, 6, (layers, count))
    change = draw.random((count, count)) * 0.3
    np.fill_diagonal(change, 0)
    limit = int(memory.min(axis=1).sum() + draw.integers(0, 12))
    best = min(
        sum(seconds[i, s] for i, s in enumerate(chosen))
        + sum(change[a, b] for a, b in itertools.pairwise(chosen))
        for chosen in itertools.product(range(count), repeat=layers)
        if sum(memory[i, s] for i, s in enumerate(chosen)) <= limit
    )
    found = plan_layers(seconds, memory, change, limit)
    assert found.seconds == pytest.approx(best)
    assert found.memory <= limit
    rows = np.arange(layers)
    again = seconds[rows, found.choice].sum() + change[found.choice[:-1], found.choice[1:]].sum()
    assert again == pytest.approx(best)


def test_too_little_memory_is_told():
    with pytest.raises(ConfigError, match="within 3 units of memory, got at least 4"):
        plan_layers(np.ones((2, 2)), np.full((2, 2), 2), np.zeros((2, 2)), 3)
