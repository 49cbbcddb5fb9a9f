"""Degrees that follow the documents."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraulis import Cost, SequenceTooLong
from hydraulis.planner.baselines import best_homogeneous, megatron_rule
from hydraulis.planner.degrees import DegreeCost, plan_degrees
from shared.errors import ConfigError

FLEXSP_7B = DegreeCost(
    cost=Cost(a=5.128e-9, b=0.18396e-3, c=0.629), cap=9_000,
    message_s={2**k: 1e-5 if k < 4 else 6e-5 for k in range(1, 16)},
)  # fmt: skip


def wikipedia_like(count, seed, most=190_000):
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(5.95, 1.258, count)), 1, most).astype(int)


def by_hand(lengths, cost, plan):
    """Seconds of each group by definition; checks that documents fit."""
    ends = []
    for group, degree in enumerate(plan.degree_of.tolist()):
        mine = lengths[plan.group_of == group]
        assert mine.sum() <= degree * cost.cap
        if len(mine):
            alone = (cost.cost.a * mine.astype(float) ** 2 + cost.cost.b * mine).sum() / degree
            messages = cost.message_s.get(degree, 0.0) * mine.sum() if degree > 1 else 0.0
            ends.append(cost.cost.c + alone + messages)
    return max(ends)


def least(lengths, num_ranks, cost):
    """Every set of groups and every assignment."""
    best = np.inf
    degrees = cost.degrees(num_ranks).tolist()
    seconds, tokens = {d: cost.seconds(lengths, d).tolist() for d in degrees}, lengths.tolist()
    for counts in itertools.product(*[range(num_ranks // d + 1) for d in degrees]):
        groups = [d for d, count in zip(degrees, counts, strict=True) for _ in range(count)]
        if not groups or sum(groups) > num_ranks or len(groups) > len(lengths):
            continue
        for placed in itertools.product(range(len(groups)), repeat=len(lengths)):
            ends = [0.0] * len(groups)
            held = [0] * len(groups)
            for i, g in enumerate(placed):
                ends[g] += seconds[groups[g]][i]
                held[g] += tokens[i]
            if all(t <= d * cost.cap for t, d in zip(held, groups, strict=True)):
                best = min(best, max(ends) + cost.cost.c)
    return best


@pytest.mark.parametrize(("num_ranks", "count"), [(64, 300), (256, 1024), (1024, 4096)])
def test_plans_come_close_to_the_bound(num_ranks, count):
    gaps = []
    for seed in range(5):
        lengths = wikipedia_like(count, seed)
        plan = plan_degrees(lengths, num_ranks, FLEXSP_7B)
        assert plan.makespan_s == pytest.approx(by_hand(lengths, FLEXSP_7B, plan))
        assert plan.degree_of.sum() <= num_ranks
        assert plan.bound_s <= plan.makespan_s
        gaps.append(plan.gap)
        assert plan.makespan_s <= best_homogeneous(lengths, num_ranks, FLEXSP_7B).makespan_s
        assert plan.makespan_s <= megatron_rule(lengths, num_ranks, FLEXSP_7B).makespan_s
    assert np.median(gaps) <= 0.015
    assert max(gaps) <= 0.05


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 3))
def test_the_bound_is_below_every_plan_of_few_documents(lengths, number):
    cost = DegreeCost(cost=Cost(a=0.01, b=0.1, c=1.0), cap=25, message_s={2: 0.01, 4: 0.03})
    lengths, num_ranks = np.array(lengths), 4
    best = least(lengths, num_ranks, cost)
    if not np.isfinite(best):
        return
    try:
        plan = plan_degrees(lengths, num_ranks, cost)
    except ConfigError:
        return  # tokens that only one arrangement holds
    assert plan.bound_s <= best * (1 + 1e-6)
    assert best * (1 - 1e-9) <= plan.makespan_s == pytest.approx(by_hand(lengths, cost, plan))


def test_a_long_document_gets_ranks_and_short_ones_share_what_is_left():
    plan = plan_degrees([30_000, *[500] * 40], 8, FLEXSP_7B)
    long = plan.degree_of[plan.group_of[0]]
    assert long >= 4, "30,000 tokens on ranks of 9,000"
    assert (plan.degree_of[1:] < long).all()


def test_too_much_is_named():
    with pytest.raises(SequenceTooLong, match="sequence 0: expected at most 36000 tokens"):
        plan_degrees([40_000], 4, FLEXSP_7B)
    with pytest.raises(ConfigError, match="at most 18000 tokens for 2 ranks"):
        plan_degrees([9_000, 9_000, 9_000], 2, FLEXSP_7B)
    with pytest.raises(ConfigError, match="expected ranks and documents"):
        plan_degrees([], 4, FLEXSP_7B)


def test_the_bound_counts_what_a_long_document_leaves_for_others():
    # One document wants half of the ranks; with more for it, none would be left for the others.
    lengths = np.array([84_000, *wikipedia_like(300, 0, most=9_000)])
    cost = DegreeCost(
        cost=FLEXSP_7B.cost, cap=9_000, message_s={2**k: 1e-4 / 2**k for k in range(1, 7)}
    )
    plan = plan_degrees(lengths, 64, cost)
    assert plan.makespan_s == pytest.approx(by_hand(lengths, cost, plan))
    areas = np.stack([cost.seconds(lengths, d) * d for d in cost.degrees(64).tolist()], axis=1)
    assert areas.min(axis=1).sum() / 64 + cost.cost.c < 0.95 * plan.bound_s, "by work alone"
    assert plan.gap < 0.02


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3), st.floats(0, 0.2), st.sampled_from([4, 8])
)
def test_the_bound_holds_where_groups_take_most_of_the_ranks(lengths, message_s, num_ranks):
    cost = DegreeCost(
        cost=Cost(a=0.02, b=0.1, c=0.5), cap=40, message_s=dict.fromkeys((2, 4, 8), message_s)
    )
    lengths = np.array(lengths)
    try:
        plan = plan_degrees(lengths, num_ranks, cost)
    except ConfigError:
        return
    best = least(lengths, num_ranks, cost)
    assert plan.bound_s <= best * (1 + 1e-6)
    assert plan.makespan_s >= best * (1 - 1e-9)


def test_groups_without_documents_take_no_time():
    cost = DegreeCost(cost=Cost(a=1e-3, b=1e-2, c=2.0), cap=100, message_s={2: 1.0, 4: 1.0})
    plan = plan_degrees([50], 4, cost)
    assert sorted(plan.seconds([50], cost)) == pytest.approx([0.0, 0.0, 0.0, 2.5 + 0.5 + 2.0])
