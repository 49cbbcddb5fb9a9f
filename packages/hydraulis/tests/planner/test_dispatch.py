"""Sequences to replicas, against exhaustive search, bounds and published ways."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraulis import Cost, Replica, SequenceTooLong, dispatch
from hydraulis.planner.baselines import karmarkar_karp, longest_first, random_greedy
from hydraulis.planner.bounds import makespan_bound
from hydraulis.planner.dispatch import makespan_s
from shared.errors import ConfigError

ALIKE = Replica(cost=Cost(a=1e-6, b=1e-2), cap=10**6)

replicas = st.builds(
    Replica,
    cost=st.builds(Cost, a=st.floats(1e-8, 1e-4), b=st.floats(1e-3, 1.0)),
    cap=st.just(1000) | st.integers(100, 1000),
    stages=st.integers(1, 4),
)


def by_hand(lengths, replicas, replica_of):
    """The definition, a replica at a time."""
    ends = []
    for j, replica in enumerate(replicas):
        mine = [s for s, k in zip(lengths, replica_of, strict=True) if k == j]
        seconds = [replica.cost.a * s * s + replica.cost.b * s for s in mine]
        ends.append(sum(seconds) + (replica.stages - 1) * max(seconds, default=0.0))
    return max(ends)


def least(lengths, replicas):
    """Every assignment."""
    found = [
        by_hand(lengths, replicas, placed)
        for placed in itertools.product(range(len(replicas)), repeat=len(lengths))
        if all(s <= replicas[j].cap for s, j in zip(lengths, placed, strict=True))
    ]
    return min(found)


def wikipedia_like(count, seed):
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(5.95, 1.258, count)), 1, 60_000).astype(int)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.lists(replicas, min_size=1, max_size=3),
)
def test_few_sequences_are_assigned_as_by_exhaustive_search(lengths, replicas):
    found = dispatch(lengths, replicas)
    best = least(lengths, replicas)
    assert found.makespan_s == pytest.approx(best)
    assert found.makespan_s == pytest.approx(by_hand(lengths, replicas, found.replica_of))
    assert found.bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("count", [8, 16])
def test_many_sequences_come_within_a_hundredth_of_the_bound(count, stages):
    lengths = wikipedia_like(1000, seed=count)
    replicas = [Replica(cost=ALIKE.cost, cap=10**6, stages=stages)] * count
    found = dispatch(lengths, replicas)
    assert found.gap <= (0.01 if stages == 1 else 0.05)
    for other in (
        longest_first(ALIKE.cost.sequence_s(lengths), count),
        karmarkar_karp(ALIKE.cost.sequence_s(lengths), count),
        random_greedy(lengths, replicas, trials=5),
    ):
        assert found.makespan_s <= makespan_s(lengths, replicas, other) * (1 + 1e-9)


def test_unlike_replicas_end_together_and_hold_what_they_can():
    lengths = wikipedia_like(400, seed=1)
    fast = Replica(cost=Cost(a=2e-7, b=3e-3), cap=60_000)
    slow = Replica(cost=Cost(a=1e-6, b=1e-2), cap=2_000)
    replicas = [fast, *[slow] * 6]
    found = dispatch(lengths, replicas)
    assert (lengths[found.replica_of > 0] <= 2_000).all()
    assert found.gap <= 0.05


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 60), st.integers(0, 99))
def test_the_bound_of_alike_pipelines_is_below_any_assignment(count, stages, number, seed):
    lengths = wikipedia_like(number, seed)
    replicas = [Replica(cost=ALIKE.cost, cap=10**6, stages=stages)] * count
    draw = np.random.default_rng(seed)
    bound = dispatch(lengths, replicas).bound_s
    for _ in range(20):
        placed = draw.integers(0, count, number)
        assert bound <= makespan_s(lengths, replicas, placed) * (1 + 1e-9)


def test_fewer_sequences_than_replicas_leave_some_without():
    found = dispatch([5, 7], [ALIKE] * 4)
    assert len(set(found.replica_of.tolist())) == 2
    assert dispatch([], [ALIKE]).makespan_s == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_over_unlike_replicas_is_below_every_assignment(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 60, draw.integers(1, 6))
    unlike = [
        Replica(
            cost=Cost(a=draw.uniform(0, 0.1), b=draw.uniform(0.5, 2)), cap=60,
            stages=int(draw.integers(1, 4)),
        )
        for _ in range(draw.integers(2, 4))
    ]  # fmt: skip
    best = min(
        by_hand(lengths, unlike, placed)
        for placed in itertools.product(range(len(unlike)), repeat=len(lengths))
    )
    assert 0.3 * best <= makespan_bound(lengths, unlike) <= best * (1 + 1e-9)


def test_the_bound_of_alike_pipelines_counts_their_warm_up():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 300), 1, 20_000).astype(int)
    found = dispatch(lengths, [Replica(cost=ALIKE.cost, cap=10**6, stages=4)] * 8)
    assert found.gap <= 0.05
    # Two each: twice 100, and 100 for each further stage.
    pipelines = [Replica(cost=Cost(a=0.0, b=1.0), cap=100, stages=4)] * 2
    assert makespan_bound(np.full(4, 100), pipelines) == pytest.approx(500, rel=1e-6)


def test_a_sequence_as_long_as_a_cap_fits():
    assert dispatch([100, 50], [Replica(cost=ALIKE.cost, cap=100)]).replica_of.tolist() == [0, 0]


def test_what_nothing_holds_is_named():
    with pytest.raises(SequenceTooLong, match="sequence 1: expected at most 100 tokens, got 101"):
        dispatch([5, 101], [Replica(cost=ALIKE.cost, cap=100), Replica(cost=ALIKE.cost, cap=50)])


@pytest.mark.parametrize("wrong", [[0], [-3], [2.5], [float("nan")], [float("inf")]])
def test_impossible_lengths_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"lengths\[1\]"):
        dispatch([4, *wrong], [ALIKE])


def test_no_replicas_are_refused():
    with pytest.raises(ConfigError, match="at least one replica"):
        dispatch([4], [])
