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


def test_units_leave_the_plan_as_it_is():
    draw = np.random.default_rng(4)
    seconds, memory = draw.random((9, 5)), draw.integers(1, 9, (9, 5))
    change = draw.random((5, 5)) * 0.2
    coarse = plan_layers(seconds, memory, change, 30)
    fine = plan_layers(seconds, memory * 2**20, change, 30 * 2**20)
    assert fine.choice.tolist() == coarse.choice.tolist()
    assert fine.memory == coarse.memory * 2**20


def halves(seconds, memory, change, half, outer):
    """Every choice of one half of the layers whose strategy beside the cut is given: [cut, choice]."""
    count = seconds.shape[1]
    chosen = np.array(list(itertools.product(range(count), repeat=len(half))))
    taken = sum(seconds[layer, chosen[:, at]] for at, layer in enumerate(half))
    taken = taken + sum(change[chosen[:, at], chosen[:, at + 1]] for at in range(len(half) - 1))
    held = sum(memory[layer, chosen[:, at]] for at, layer in enumerate(half))
    return [(taken[rows], held[rows]) for rows in (chosen[:, outer] == s for s in range(count))]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_eight_layers_on_eight_devices_are_planned_as_by_exhaustive_search(share):
    layers, count = 8, len(hy.galvatron.strategies(8))
    draw = np.random.default_rng(int(share * 100))
    # Two kinds of layers, as models have; what takes more memory is often faster.
    memory = np.repeat(draw.integers(50, 900, (2, count)), [3, 5], axis=0)
    seconds = 30 / memory + np.repeat(draw.random((2, count)) * 0.1, [3, 5], axis=0)
    change = draw.random((count, count)) * 0.05
    np.fill_diagonal(change, 0)
    low, high = memory.min(axis=1).sum(), memory.max(axis=1).sum()
    limit = int(low + share * (high - low))
    # Both halves in full; for each pair of strategies at the cut, all pairs by a sorted table.
    early = halves(seconds, memory, change, range(4), outer=3)
    late = halves(seconds, memory, change, range(4, 8), outer=0)
    best = np.inf
    for b, (late_s, late_held) in enumerate(late):
        rising = np.argsort(late_held)
        least_s = np.minimum.accumulate(late_s[rising])
        for a, (early_s, early_held) in enumerate(early):
            at = np.searchsorted(late_held[rising], limit - early_held, side="right")
            fits = at > 0
            both = early_s[fits] + least_s[at[fits] - 1] + change[a, b]
            best = min(best, both.min(initial=np.inf))
    found = plan_layers(seconds, memory, change, limit)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert found.memory <= limit
    assert layers == len(found.choice)


@pytest.mark.parametrize("kinds", [1, 2, 48])
def test_48_layers_on_64_devices_keep_within_their_memory(kinds):
    count = len(hy.galvatron.strategies(64))
    draw = np.random.default_rng(kinds)
    kind = np.arange(48) % kinds
    memory = draw.integers(100, 2500, (kinds, count))[kind]
    seconds = 1e6 / memory + draw.random((kinds, count))[kind]
    change = draw.random((count, count)) * 20
    np.fill_diagonal(change, 0)
    found = plan_layers(seconds, memory, change, 40_000)
    assert found.memory <= 40_000


def test_seconds_that_fall_evenly_with_memory_are_planned_too():
    draw = np.random.default_rng(1)
    memory = draw.integers(100, 2500, (48, 79))
    found = plan_layers((3000 - memory).astype(float), memory, np.zeros((79, 79)), 40_000)
    assert found.seconds == 48 * 3000 - 40_000, "nearly all choices are as good"


def test_strategies_that_cannot_be_are_left_out():
    seconds = np.array([[1.0, np.inf, 5.0], [np.inf, 1.0, 4.0]])
    change = np.array([[0.0, np.inf, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = plan_layers(seconds, np.ones((2, 3), dtype=int), change, 9)
    assert found.choice.tolist() == [2, 1]
    assert found.seconds == 6.0
    with pytest.raises(ConfigError, match="expected a strategy for each layer"):
        plan_layers(np.full((2, 2), np.inf), np.ones((2, 2), dtype=int), np.zeros((2, 2)), 9)


def test_entries_that_make_no_sense_are_named():
    ones, whole = np.ones((2, 2)), np.ones((2, 2), dtype=int)
    with pytest.raises(ConfigError, match=r"seconds\[1, 0\]: expected 0 or more, got nan"):
        plan_layers(np.array([[1.0, 1.0], [np.nan, 1.0]]), whole, ones, 3)
    with pytest.raises(ConfigError, match=r"memory\[0, 0\]: expected 0 or more, got -1"):
        plan_layers(ones, -whole, ones, 3)
