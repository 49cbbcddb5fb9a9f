"""Plans of a step with degrees that change from micro-batch to micro-batch."""

import functools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydraulis.config import Cost, SequenceTooLong
from hydraulis.planner.degrees import DegreeCost
from hydraulis.planner.schedule import plan_step, step_bound
from shared.errors import ConfigError

MESSAGES = {2: 0.002, 4: 0.003, 8: 0.004}


def cost(cap=100, c=0.5, message_s=MESSAGES):
    return DegreeCost(cost=Cost(a=1e-4, b=1e-2, c=c), cap=cap, message_s=message_s)


def check(plan, lengths, num_ranks, of, sync):
    """Every document once, within its group's tokens, groups in one order on all ranks; its seconds."""
    queues = plan.micro_batches
    assert len(queues) == num_ranks
    found = [mb for rank, queue in enumerate(queues) for mb in queue if mb.first == rank]
    assert sorted(i for mb in found for i in mb.documents) == list(range(len(lengths)))
    for rank, queue in enumerate(queues):
        for mb in queue:
            assert rank in mb.ranks
            assert mb.first % mb.degree == 0
            assert sum(lengths[i] for i in mb.documents) <= mb.degree * of.cap
    # Played by hand: a group begins when all of its ranks are there with the same micro-batch.
    clock, at = np.zeros(num_ranks), [0] * num_ranks
    busy, meetings = np.zeros(num_ranks), 0
    while any(at[rank] < len(queue) for rank, queue in enumerate(queues)):
        if sync == "micro-batch":
            clock[:] = clock.max()  # nobody begins another before all have met
        moved, meetings = False, meetings + 1
        for rank in range(num_ranks):
            if at[rank] == len(queues[rank]) or (sync == "micro-batch" and at[rank] == meetings):
                continue
            mb = queues[rank][at[rank]]
            if mb.first == rank and all(
                at[other] < len(queues[other]) and queues[other][at[other]] is mb
                for other in mb.ranks
            ):
                seconds = 0.0
                if mb.documents:
                    sizes = np.array([lengths[i] for i in mb.documents])
                    seconds = of.cost.c + float(of.seconds(sizes, mb.degree).sum())
                begin = max(clock[other] for other in mb.ranks)
                for other in mb.ranks:
                    clock[other], at[other] = begin + seconds, at[other] + 1
                    busy[other] += seconds
                moved = True
        assert moved, "ranks wait for one another for ever"
    return clock, busy


@example(lengths=[1, 1, 399], num_ranks=4, sync="micro-batch")
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    sync=st.sampled_from(["step", "micro-batch"]),
)
def test_ranks_meet_and_end_when_the_plan_says(lengths, num_ranks, sync):
    of = cost()
    if max(lengths) > 2 ** int(np.log2(num_ranks)) * of.cap:
        with pytest.raises(SequenceTooLong):
            plan_step(lengths, num_ranks, of, sync)
        return
    plan = plan_step(lengths, num_ranks, of, sync)
    clock, busy = check(plan, lengths, num_ranks, of, sync)
    assert clock.max() == pytest.approx(plan.makespan_s)
    assert busy.tolist() == pytest.approx(plan.seconds.tolist())
    assert 0 < plan.bound_s <= plan.makespan_s * (1 + 1e-12)
    assert 0 <= plan.idle_share < 1
    if sync == "micro-batch":
        assert len({len(queue) for queue in plan.micro_batches}) == 1


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20),
    sync=st.sampled_from(["step", "micro-batch"]),
    degree=st.sampled_from([2, 4]),
)
def test_a_fixed_degree_holds_for_every_document(lengths, sync, degree):
    of = replace(cost(), min_degree=degree, max_degree=degree)
    if max(lengths) > degree * of.cap:
        return
    plan = plan_step(lengths, 4, of, sync)
    check(plan, lengths, 4, of, sync)
    used = {mb.degree for queue in plan.micro_batches for mb in queue if mb.documents}
    assert used == {degree}


def best_by_hand(lengths, of):
    """Two ranks: each document on rank 0, 1 or both; micro-batches are without a fixed part."""
    sizes, best = np.array(lengths), np.inf
    one, two = of.seconds(sizes, 1), of.seconds(sizes, 2)
    for places in product(range(3), repeat=len(lengths)):
        loads, chosen = [0.0, 0.0], np.array(places)
        if any(place < 2 and size > of.cap for place, size in zip(places, lengths, strict=True)):
            continue
        for rank in range(2):
            loads[rank] = float(one[chosen == rank].sum() + two[chosen == 2].sum())
        best = min(best, max(loads))
    return best


@given(lengths=st.lists(st.integers(1, 190), min_size=1, max_size=7))
def test_two_ranks_end_about_as_soon_as_by_trying_everything(lengths):
    of = cost(c=0.0)
    plan = plan_step(lengths, 2, of)
    best = best_by_hand(lengths, of)
    assert plan.bound_s <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= plan.makespan_s <= 1.2 * best


@functools.cache
def fewest_micro_batches(sizes, cap):
    """By trying every way to put few documents into micro-batches."""
    best = len(sizes)
    for places in product(range(len(sizes)), repeat=len(sizes)):
        held = [0] * len(sizes)
        for size, place in zip(sizes, places, strict=True):
            held[place] += size
        if max(held, default=0) <= cap:
            best = min(best, len(set(places)))
    return best


def best_with_fixed_parts(lengths, of):
    """Two ranks: each document on rank 0, 1 or both, in as few micro-batches as hold them."""
    sizes, best = np.array(lengths), np.inf
    one, two = of.seconds(sizes, 1), of.seconds(sizes, 2)
    for places in product(range(3), repeat=len(lengths)):
        chosen = np.array(places)
        if (sizes[chosen < 2] > of.cap).any():
            continue
        parts = [tuple(sorted(sizes[chosen == place].tolist())) for place in range(3)]
        together_s = two[chosen == 2].sum() + of.cost.c * fewest_micro_batches(parts[2], 2 * of.cap)
        loads = [
            one[chosen == rank].sum() + of.cost.c * fewest_micro_batches(parts[rank], of.cap)
            for rank in range(2)
        ]
        best = min(best, together_s + max(loads))
    return best


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 190), min_size=1, max_size=5),
    c=st.sampled_from([0.1, 1.0, 10.0]),
    message_s=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_no_two_ranks_end_before_the_bound_with_fixed_parts(lengths, c, message_s):
    of = cost(c=c, message_s={2: message_s})
    best = best_with_fixed_parts(lengths, of)
    assert step_bound(np.array(lengths), 2, of) <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= plan_step(lengths, 2, of).makespan_s <= 1.2 * best


def test_short_documents_fill_a_large_groups_micro_batch_where_each_costs_much():
    of = cost(c=10.0, message_s={})
    plan = plan_step([112, 147, 25, 61], 2, of)
    assert plan.makespan_s == pytest.approx(best_with_fixed_parts([112, 147, 25, 61], of), rel=0.01)
    assert {one.degree for queue in plan.micro_batches for one in queue} == {2}


def test_the_bound_of_a_slow_document_counts_only_its_own_fixed_part():
    # A rank has one slow document, the other the short ones in four micro-batches.
    of = DegreeCost(cost=Cost(a=1e-3, b=0.0, c=1.0), cap=100, message_s={2: 1.0})
    plan = plan_step([100, *[5] * 80], 2, of)
    assert plan.makespan_s == 11.0
    assert step_bound(np.array(plan.lengths), 2, of) == 11.0


def test_a_long_document_gets_ranks_for_its_micro_batch_only():
    lengths = [390, *[20] * 60]
    of = cost()
    plan = plan_step(lengths, 4, of)
    for queue in plan.micro_batches:
        assert queue[0].degree == 4
        assert queue[0].documents == (0,)
        assert {mb.degree for mb in queue[1:]} == {1}
    assert plan.idle_share < 0.02
    assert plan.gap < 0.2


def test_a_document_that_would_end_last_gets_more_ranks_than_it_needs():
    of = cost(cap=1000, c=0.0, message_s={})
    plan = plan_step([900, 30, 30, 30], 4, of)
    (widest,) = {mb.degree for queue in plan.micro_batches for mb in queue if 0 in mb.documents}
    assert widest == 4
    assert plan.gap < 0.01


def test_many_short_documents_are_balanced():
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(3, 1, 4000).astype(int) + 1, 390)
    plan = plan_step(lengths, 8, cost())
    check(plan, lengths, 8, cost(), "step")
    assert plan.idle_share < 0.01


@pytest.mark.parametrize("message_s", [{}, {2: 0.05}])
def test_ranks_that_meet_often_share_no_document_without_need(message_s):
    of = cost(c=0.01, message_s=message_s)
    lengths = [95, 60, 90, 30, 30, 20, 45, 45, 10, 70, 80, 25, 60, 40, 50, 50]
    plan = plan_step(lengths, 2, of, "micro-batch")
    check(plan, lengths, 2, of, "micro-batch")
    assert {mb.degree for queue in plan.micro_batches for mb in queue} == {1}
    # What every slot waits is little, though no two documents are alike.
    assert plan.makespan_s <= 1.04 * plan.bound_s
    longer = plan_step([*lengths, 150], 2, of, "micro-batch")
    assert {mb.degree for queue in longer.micro_batches for mb in queue} >= {2}


def test_equal_plans_have_equal_digests_and_others_do_not():
    first, again = (plan_step([5, 9, 30], 2, cost()) for _ in range(2))
    assert first.digest == again.digest
    assert plan_step([5, 9, 31], 2, cost()).digest != first.digest
    assert plan_step([5, 9, 30], 2, cost(), "micro-batch").digest != first.digest


def test_bad_input():
    with pytest.raises(SequenceTooLong, match=r"sequence 1: expected at most 200 tokens, got 201"):
        plan_step([3, 201], 3, cost())
    with pytest.raises(ConfigError, match="sync: expected one of step, micro-batch, got 'never'"):
        plan_step([3], 1, cost(), "never")
    with pytest.raises(ConfigError, match="expected ranks and documents, got 2 and 0"):
        plan_step([], 2, cost())
