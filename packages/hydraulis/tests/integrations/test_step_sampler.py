"""Whole epochs of the samplers: every document once, for any lengths, ranks and accumulation."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hydraulis as hy
from hydraulis.integrations.step_sampler import StepSampler
from hydraulis.planner.steps import count_steps, cut_epoch
from shared.errors import ConfigError

COST = hy.Cost(a=1e-3, b=1e-2, c=0.1)
CAP = 64

lengths_of_documents = st.one_of(
    st.lists(st.integers(1, CAP), min_size=1, max_size=60),
    st.lists(st.integers(CAP // 2 - 1, CAP // 2 + 2), min_size=1, max_size=40),
    st.builds(lambda length, count: [length] * count, st.integers(1, CAP), st.integers(1, 60)),
)


def make_samplers(lengths, num_ranks, slots, too_long="raise"):
    return [
        StepSampler(
            lengths, cost=COST, cap=CAP, num_ranks=num_ranks, rank=rank, slots=slots, seed=0,
            too_long=too_long,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(lengths_of_documents, st.integers(1, 4), st.integers(1, 4))
@example([CAP // 2 + 1] * 40, 1, 4)
@example([1], 4, 2)
@example([36] * 20 + [18] * 20, 1, 1)  # only packing all at once leaves no document over
def test_no_document_of_a_trainers_epoch_is_lost_or_doubled(lengths, num_ranks, slots):
    samplers = make_samplers(lengths, num_ranks, slots)
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [list(sampler) for sampler in samplers]
        assert {len(parts) for parts in ranks} == {len(samplers[0])}
        documents = [i for parts in ranks for part in parts for i in part]
        assert sorted(documents) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in part) <= CAP for parts in ranks for part in parts)
        for begin in range(0, len(samplers[0]), slots):
            step = [part for parts in ranks for part in parts[begin : begin + slots]]
            assert any(step), "a step without a document would divide by no token"


@settings(deadline=None, max_examples=60)
@given(
    lengths_of_documents, st.integers(1, 4), st.integers(1, 400),
    st.sampled_from(["step", "micro-batch"]),
)  # fmt: skip
@example([47] * 3, 2, 400, "step")
@example([47] * 3, 2, 400, "micro-batch")
@example([33] * 40, 2, 400, "micro-batch")
def test_no_document_of_a_loops_epoch_is_lost_or_doubled(lengths, num_ranks, tokens, sync):
    given_ = {"tokens_per_step": tokens, "num_ranks": num_ranks, "cost": COST, "cap": CAP}
    if len(lengths) < num_ranks:
        with pytest.raises(ConfigError, match="at least a document for each"):
            hy.BalancedBatchSampler(lengths, rank=0, sync=sync, **given_)
        return
    samplers = [
        hy.BalancedBatchSampler(lengths, rank=rank, sync=sync, **given_)
        for rank in range(num_ranks)
    ]
    steps = [list(sampler.steps()) for sampler in samplers]
    documents = [i for parts in steps for step in parts for part in step for i in part]
    assert sorted(documents) == list(range(len(lengths)))
    assert [len(sampler) for sampler in samplers] == [sum(map(len, parts)) for parts in steps]
    for every in zip(*steps, strict=True):
        assert len({len(step) for step in every}) == 1 or sync == "step"
        for step in every:
            assert step
            assert sync == "micro-batch" or all(step)
            assert all(sum(lengths[i] for i in part) <= CAP for part in step)


def test_many_ordinary_lengths_go_through_a_whole_epoch():
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(5.95, 1.258, 1500)), 1, 4096).astype(int)
    sampler = hy.BalancedBatchSampler(
        lengths, tokens_per_step=9000, num_ranks=2, rank=0, cost=COST, cap=4096
    )
    assert sum(map(len, sampler)) > 0


def test_steps_keep_the_order_of_the_shuffle_where_there_is_room():
    lengths = np.random.default_rng(0).integers(1, 41, 300)
    order = np.random.default_rng(1).permutation(300)
    num_steps = count_steps(lengths, order, 40, 6)
    steps = cut_epoch(lengths, order, num_steps, 40, 6)
    assert sorted(chain(*steps)) == list(range(300))
    in_order = [i for number, i in enumerate(chain(*steps)) if order[number] == i]
    assert len(in_order) > 200
    tokens = np.array([lengths[step].sum() for step in steps])
    assert tokens.max() < 1.3 * tokens.mean()
    assert num_steps <= 1.2 * lengths.sum() / (6 * 40) + 1, "micro-batches are full"


def test_epochs_differ_even_where_packing_leaves_no_choice():
    (sampler,) = make_samplers([33] * 12, 1, 2)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_only_documents_that_the_user_gives_up_are_left_out():
    (sampler,) = make_samplers([33, 65, 20], 1, 1, too_long="drop")
    assert sorted(chain(*sampler)) == [0, 2]
    with pytest.raises(hy.SequenceTooLong, match="sequence 1: expected at most 64"):
        make_samplers([33, 65, 20], 1, 1)
