"""Longest first, enumeration and local search, against brute force."""

from itertools import product

import numpy as np
import pytest

from heta.partitioning.balance import enumerate_assignments, lpt, search_locally
from shared.errors import ConfigError


def test_lpt_gives_the_heaviest_unit_to_the_least_part():
    assert lpt([3, 7, 2, 5], 2) == [1, 0, 0, 1]
    assert lpt([1, 1, 1], 1) == [0, 0, 0]
    assert lpt([], 3) == []


@pytest.mark.parametrize("seed", range(5))
def test_lpt_is_within_a_third_of_the_best_makespan(seed):
    weights = np.random.default_rng(seed).integers(1, 50, 7)
    parts = 3
    sums = np.bincount(lpt(weights.tolist(), parts), weights, parts)
    best = min(
        np.bincount(choice, weights, parts).max() for choice in product(range(parts), repeat=7)
    )
    assert sums.sum() == weights.sum()
    assert best <= sums.max() <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9


def test_lpt_puts_units_of_a_group_into_different_parts():
    assignment = lpt([5, 5, 5, 1, 1], 3, ["a", "a", "a", "b", "b"])
    assert sorted(assignment[:3]) == [0, 1, 2]
    assert assignment[3] != assignment[4]
    # Without groups the light part would take both.
    assert lpt([9, 1, 1], 2, ["x", "y", "y"]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("weights", "parts", "message"),
    [
        ([1], 0, "parts: expected at least 1"),
        ([1, -2], 2, r"weights\[1\]: expected a finite number from 0, got -2"),
        ([float("nan")], 2, r"weights\[0\]"),
    ],
)
def test_lpt_refuses(weights, parts, message):
    with pytest.raises(ConfigError, match=message):
        lpt(weights, parts)


@pytest.mark.parametrize(("units", "parts"), [(1, 1), (4, 2), (5, 3), (6, 6), (7, 4)])
def test_enumeration_yields_each_partition_once(units, parts):
    everything = np.concatenate(
        list(enumerate_assignments(units, parts, lambda prefixes: np.ones(len(prefixes), bool)))
    )
    expected = {
        frozenset(frozenset(np.flatnonzero(np.array(choice) == p).tolist()) for p in range(parts))
        for choice in product(range(parts), repeat=units)
        if len(set(choice)) == parts
    }
    yielded = [
        frozenset(frozenset(np.flatnonzero(row == p).tolist()) for p in range(parts))
        for row in everything
    ]
    assert len(yielded) == len(expected)
    assert set(yielded) == expected


def test_enumeration_leaves_out_what_is_not_promising():
    def is_promising(prefixes):
        return (prefixes[:, 1:2] == 1).all(axis=1)

    rows = np.concatenate(list(enumerate_assignments(4, 2, is_promising)))
    assert (rows[:, 1] == 1).all()
    assert len(rows) == 4


def _makespan(weights, parts):
    def evaluate(assignment, changes):
        costs = []
        for unit, part, other, others_part in changes:
            changed = assignment.copy()
            changed[unit] = part
            if other >= 0:
                changed[other] = others_part
            assert len(set(changed)) == parts, "no part may become empty"
            costs.append(np.bincount(changed, weights, parts).max())
        return np.array(costs, dtype=float)

    def find_heaviest(assignment):
        return int(np.bincount(assignment, weights, parts).argmax())

    return evaluate, find_heaviest


def test_local_search_needs_swaps_and_moves():
    weights = np.array([8.0, 7, 6, 5, 4])
    evaluate, find_heaviest = _makespan(weights, 2)
    # 15 : 15 is reached from 21 : 9 by a swap of 8 and 4, ... or moves.
    assignment, cost = search_locally([0, 0, 0, 1, 1], 2, evaluate, find_heaviest)
    assert cost == 15
    assert np.bincount(assignment, weights, 2).tolist() == [15, 15]


def test_local_search_of_many_units_draws_candidates_and_repeats():
    weights = np.random.default_rng(0).uniform(1, 9, 120)
    evaluate, find_heaviest = _makespan(weights, 8)
    start = np.arange(120) % 8
    first, cost = search_locally(start, 8, evaluate, find_heaviest)
    again, _ = search_locally(start, 8, evaluate, find_heaviest)
    assert (first == again).all()
    assert cost < np.bincount(start, weights, 8).max()
    assert cost < 1.02 * weights.sum() / 8
