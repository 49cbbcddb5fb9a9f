"""FlexSP's program, against every set of groups and every assignment of charged documents."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydraulis as hy
from hydraulis.planner.baselines import best_homogeneous
from hydraulis.planner.degrees import DegreeCost
from shared.errors import ConfigError

COST = DegreeCost(cost=hy.Cost(a=0.01, b=0.1, c=1.0), cap=25, message_s={2: 0.01, 4: 0.03})
FLEXSP_7B = DegreeCost(
    cost=hy.Cost(a=5.128e-9, b=0.18396e-3, c=0.629), cap=9_000,
    message_s={2**k: 1e-5 if k < 4 else 6e-5 for k in range(1, 16)},
)  # fmt: skip


def ends(lengths, cost, degrees, placed):
    """Seconds of each group by definition; infinite where tokens exceed what it holds."""
    found = []
    for group, d in enumerate(degrees):
        mine = [s for s, g in zip(lengths, placed, strict=True) if g == group]
        alone = sum(cost.cost.a * s * s + cost.cost.b * s for s in mine) / d
        messages = cost.message_s.get(d, 0.0) * sum(mine) if d > 1 else 0.0
        fits = sum(mine) <= d * cost.cap
        found.append((cost.cost.c + alone + messages if mine else 0.0) if fits else np.inf)
    return found


def least(lengths, num_ranks, cost):
    best = np.inf
    for counts in itertools.product(*[range(num_ranks // d + 1) for d in (1, 2, 4)]):
        degrees = [d for d, count in zip((1, 2, 4), counts, strict=True) for _ in range(count)]
        if 0 < sum(degrees) <= num_ranks and len(degrees) <= len(lengths):
            for placed in itertools.product(range(len(degrees)), repeat=len(lengths)):
                best = min(best, max(ends(lengths, cost, degrees, placed)))
    return best


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 5))
def test_plans_are_those_of_exhaustive_search_of_charged_lengths(lengths, num_buckets):
    if sum(lengths) > 4 * COST.cap:
        return
    # The published rule: more buckets until no more than half of the room is charged.
    while hy.flexsp.buckets(lengths, num_buckets).error > (4 * COST.cap - sum(lengths)) / 2:
        num_buckets *= 2
    tops = hy.flexsp.buckets(lengths, num_buckets).boundaries
    charged = [min(top for top in tops if top >= s) for s in lengths]
    best = least(charged, 4, COST)
    try:
        plan = hy.flexsp.plan(lengths, 4, COST, num_buckets=num_buckets)
    except ConfigError:
        assert not np.isfinite(best)
        return
    if np.isfinite(best):
        degrees, placed = plan.degree_of.tolist(), plan.group_of.tolist()
        assert max(ends(charged, COST, degrees, placed)) == pytest.approx(best, rel=1e-5)
    assert plan.makespan_s == pytest.approx(
        max(ends(lengths, COST, plan.degree_of.tolist(), plan.group_of.tolist()))
    )
    assert plan.degree_of.sum() <= 4
    assert plan.bound_s <= least(lengths, 4, COST) * (1 + 1e-9)


def test_what_is_found_in_time_is_valid_and_never_worse_than_one_degree():
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(5.95, 1.258, 300)), 1, 60_000).astype(int)
    plan = hy.flexsp.plan(lengths, 64, FLEXSP_7B, time_limit_s=0.5)
    held = ends(lengths.tolist(), FLEXSP_7B, plan.degree_of.tolist(), plan.group_of.tolist())
    assert plan.makespan_s == pytest.approx(max(held))
    assert plan.degree_of.sum() <= 64
    assert plan.bound_s == 0.0, "documents were charged too much, so nothing is proven"
    tops = np.array(hy.flexsp.buckets(lengths, 16).boundaries)
    charged = tops[np.searchsorted(tops, lengths)]
    alike = best_homogeneous(charged, 64, FLEXSP_7B)
    mine = ends(charged.tolist(), FLEXSP_7B, plan.degree_of.tolist(), plan.group_of.tolist())
    assert max(mine) <= alike.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("held", [(0, 0.999, 1.001), (1, 1, 0), (0, 0.999, 0)])
def test_answers_of_the_solver_are_rounded_and_checked(monkeypatch, held):
    plant(monkeypatch, held)
    # Groups of 2, 1 and 1 ranks: there are not ranks for the first two together, and the last answer
    # leaves a document out.
    plan = hy.flexsp.plan([20, 20], 2, COST)
    assert sorted(plan.group_of.tolist()) == [0, 1]
    assert plan.degree_of.tolist() == [1, 1]


def test_answers_that_overfill_a_rank_are_not_taken(monkeypatch):
    # Two documents on one rank exceed its 25 tokens, however slow messages are.
    plant(monkeypatch, (0, 1.6, 1.4))
    slow = DegreeCost(cost=COST.cost, cap=25, message_s={2: 9.0})
    assert hy.flexsp.plan([13, 13, 13], 2, slow).degree_of.tolist() == [2]


def plant(monkeypatch, held):
    """Has the solver give these documents of one bucket by group."""

    def solver(aim, **_):
        found = np.zeros(len(aim))
        found[: len(held)] = held
        return SimpleNamespace(x=found, mip_dual_bound=None)

    monkeypatch.setattr("hydraulis.planner.flexsp.program.milp", solver)


def test_what_is_proven_of_padded_documents_is_not_claimed():
    assert hy.flexsp.plan([10, 9, 8], 2, COST, num_buckets=1).bound_s == 0.0
    exact = hy.flexsp.plan([10, 9, 8], 2, COST)
    assert exact.bound_s == pytest.approx(exact.makespan_s)


def test_bad_input_is_named():
    with pytest.raises(hy.SequenceTooLong, match="sequence 1: expected at most 100 tokens"):
        hy.flexsp.plan([3, 101], 4, COST)
    with pytest.raises(ConfigError, match="expected ranks, documents and a time limit above 0"):
        hy.flexsp.plan([3], 4, COST, time_limit_s=0.0)
    with pytest.raises(ConfigError, match="found no groups of 2 ranks for 60 tokens"):
        hy.flexsp.plan([20, 20, 20], 2, COST)
