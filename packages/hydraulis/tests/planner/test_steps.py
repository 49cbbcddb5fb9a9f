"""Steps of an epoch, and a step's micro-batches on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraulis import Cost
from hydraulis.planner.steps import cut_epoch, cut_steps, plan_ranks, plan_slots
from hydraulis.planner.steps.bins import fill_bins, split_bins
from shared.errors import ConfigError

COST = Cost(a=1e-6, b=1e-2, c=0.1)


def drawn(count, seed, most=8000):
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(5.95, 1.258, count)), 1, most).astype(int)


@given(
    st.integers(1, 5), st.sampled_from(["step", "micro-batch"]), st.integers(0, 50),
    st.integers(2_000, 60_000),
)  # fmt: skip
def test_every_document_once_and_as_many_micro_batches_on_every_rank(ranks, sync, seed, tokens):
    lengths = drawn(120, seed)
    order = np.random.default_rng(seed).permutation(120)
    seen = []
    for step in cut_steps(lengths, order, tokens, ranks):
        planned = plan_ranks(lengths[step], ranks, COST, 8192, sync)
        assert len({len(mine) for mine in planned}) == 1
        for mine in planned:
            for part in mine:
                assert part
                assert lengths[step][part].sum() <= 8192
                seen += step[part].tolist()
    assert seen != sorted(seen), "in the order of a shuffle"
    assert sorted(seen) == list(range(120))


@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_ranks_end_together(sync):
    lengths = drawn(300, 3)
    planned = plan_ranks(lengths, 4, COST, 8192, sync)
    seconds = np.array([[COST.micro_batch_s(lengths[part]) for part in mine] for mine in planned])
    if sync == "step":
        sums = seconds.sum(axis=1)
        assert sums.max() <= 1.01 * sums.mean()
    else:
        slots = seconds.max(axis=0).sum()
        assert slots <= 1.02 * seconds.sum() / 4


def test_a_step_never_has_fewer_documents_than_ranks():
    steps = list(cut_steps(np.array([9] * 10), np.arange(10), 10, 4))
    assert [len(step) for step in steps] == [4, 6], "two are too few for a step of their own"


def test_a_step_ends_when_it_has_its_tokens():
    steps = list(cut_steps(np.array([5] * 6), np.arange(6), 10, 1))
    assert [step.tolist() for step in steps] == [[0, 1], [2, 3], [4, 5]]


def test_the_rank_with_least_so_far_takes_a_slots_largest():
    cost = Cost(a=0.0, b=1.0)
    ranks = plan_slots(np.array([10, 8, 6, 5]), 2, cost, 10, 2)
    assert ranks == [[[0], [3]], [[1], [2]]]


def test_too_few_documents_are_refused():
    with pytest.raises(ConfigError, match="for each of 4 ranks, got 3"):
        list(cut_steps(np.array([5, 5, 5]), np.arange(3), 100, 4))


def test_ranks_differ_or_wait_with_nothing_where_documents_allow_no_equal_numbers():
    assert sorted(map(len, plan_ranks([100] * 5, 4, COST, 100))) == [1, 1, 1, 2]
    ranks = plan_ranks([100] * 5, 4, COST, 100, "micro-batch")
    assert sorted(sorted(map(len, parts)) for parts in ranks) == [[0, 1], [0, 1], [0, 1], [1, 1]]
    # Three of half the room and more do not fit two ranks' equal numbers; one rank takes two.
    assert sorted(map(len, plan_ranks([3000] * 3, 2, COST, 4096))) == [1, 2]
    # Where numbers differ, ranks still end together.
    lengths = np.array([5, 10, 6, 8, 10])
    ranks = plan_ranks(lengths, 2, Cost(a=0.0, b=1.0), 10)
    assert sorted(map(len, ranks)) == [2, 3]
    assert sorted(sum(lengths[part].sum() for part in parts) for parts in ranks) == [19, 20]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 40))
def test_bins_hold_every_document_once_and_can_be_split(lengths, count):
    bins = fill_bins(np.array(lengths), np.arange(len(lengths)), 20)
    assert len(bins) <= max(1, 2 * sum(lengths) // 20), "any two hold more than one could"
    for parts in (bins, split_bins(bins, min(count, len(lengths)))):
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert all(part and sum(lengths[i] for i in part) <= 20 for part in parts)
    assert len(split_bins(bins, min(count, len(lengths)))) >= min(count, len(lengths))


def test_a_packing_that_the_search_for_equal_seconds_misses_is_taken():
    lengths = np.array(
        [57, 7, 64, 42, 15, 7, 4, 55, 5, 7, 57, 40, 24]
    )  # six micro-batches, all full
    ranks = plan_slots(lengths, 2, Cost(a=1e-3, b=1e-2, c=0.1), 64, 3)
    assert ranks is not None
    assert [lengths[part].sum() for parts in ranks for part in parts] == [64] * 6


def test_bins_take_the_fullest_that_has_room():
    assert sorted(map(sorted, fill_bins(np.array([6, 5, 4, 3, 2]), np.arange(5), 10))) == [
        [0, 2], [1, 3, 4],
    ]  # fmt: skip


def test_the_largest_bins_are_halved_first():
    parts = split_bins([list(range(8)), [8], [9, 10]], 6)
    assert sorted(map(len, parts)) == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("lengths", "order", "steps"),
    [
        # Those that the last step has no room for go to the emptiest steps, the longest first.
        ([6, 5, 6, 9, 2, 5], [0, 1, 2, 3, 4, 5], [[0, 4], [1, 5], [2], [3]]),
        (
            [5, 2, 3, 2, 4, 10, 1, 8, 2, 7, 1, 2],
            [4, 9, 0, 6, 10, 7, 2, 5, 8, 3, 11, 1],
            [[1, 3, 4], [9], [0, 6, 10], [7], [2, 8, 11], [5]],
        ),
        # All are packed at once, and come as their first documents do in the order.
        ([7, 4, 5, 7], [1, 0, 2, 3], [[1, 2], [0], [3]]),
        ([2, 3, 10, 10, 2, 9], [1, 5, 4, 3, 0, 2], [[1, 0], [5], [4], [3], [2]]),
    ],
)
def test_documents_without_room_in_order_find_a_step(lengths, order, steps):
    cut = cut_epoch(np.array(lengths), np.array(order), len(steps), 10, 1)
    assert [sorted(step.tolist()) for step in cut] == [sorted(step) for step in steps]


def test_an_unknown_way_to_wait_is_refused():
    with pytest.raises(ConfigError, match="expected one of step, micro-batch"):
        plan_ranks([1, 2], 1, COST, 10, sync="epoch")
