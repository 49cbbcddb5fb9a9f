"""Documents to micro-batches, and unequal micro-batches in a pipeline."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraulis import Cost, SequenceTooLong, pack, pipeline_s
from shared.errors import ConfigError

COST = Cost(a=1e-3, b=0.1, c=2.0)


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]


def clock(seconds, stages):
    """1F1B by a graph of passes: a pass starts when its inputs and its stage's last pass are done."""
    count, third = len(seconds), 1 / 3
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, count)
        order = [("f", i) for i in range(ahead)]
        for i in range(count):
            if ahead + i < count:
                order.append(("f", ahead + i))
            order.append(("b", i))
        orders.append(order)
    ends = {}

    def end(kind, i, stage):
        if (kind, i, stage) not in ends:
            at = orders[stage].index((kind, i))
            last, other = orders[stage][at - 1]
            before = end(last, other, stage) if at else 0.0
            if kind == "f":
                ready = end("f", i, stage - 1) if stage else 0.0
            else:
                ready = end("b", i, stage + 1) if stage + 1 < stages else end("f", i, stage)
            took = seconds[i] * (third if kind == "f" else 1 - third)
            ends[kind, i, stage] = max(before, ready) + took
        return ends[kind, i, stage]

    return max(end("b", i, 0) for i in range(count))


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=7), st.integers(1, 4))
def test_a_pipeline_is_what_a_graph_of_its_passes_says(seconds, stages):
    assert pipeline_s(seconds, stages) == pytest.approx(clock(seconds, stages))


def test_equal_micro_batches_follow_the_closed_form():
    assert pipeline_s([3.0] * 5, 4) == pytest.approx(3.0 * (4 - 1 + 5))
    assert pipeline_s([], 4) == 0.0


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(ConfigError, match="0 stages"):
        pipeline_s([1.0], 0)
    with pytest.raises(ConfigError, match="-1"):
        pipeline_s([-1.0], 2)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(100, 250))
def test_a_stage_alone_packs_into_the_fewest_and_levels_them(lengths, cap):
    found = pack(lengths, COST, cap)
    assert sorted(i for part in found.micro_batches for i in part) == list(range(len(lengths)))
    possible = [
        parts
        for parts in partitions(list(range(len(lengths))))
        if all(sum(lengths[i] for i in part) <= cap for part in parts)
    ]
    fewest = min(map(len, possible))
    assert len(found.micro_batches) == fewest
    seconds = COST.sequence_s(lengths)
    least = min(
        max(seconds[part].sum() for part in parts) for parts in possible if len(parts) == fewest
    )
    assert found.max_s == pytest.approx(least)
    assert found.time_s == pytest.approx(seconds.sum() + COST.c * fewest)
    assert found.upper_s == pytest.approx((found.max_s + COST.c) * fewest)


@pytest.mark.parametrize("count", [5, pytest.param(6, marks=pytest.mark.slow)])
@given(data=st.data(), cap=st.integers(100, 250), stages=st.integers(2, 4))
def test_a_pipeline_is_packed_close_to_the_best_of_all_packings_and_orders(
    count, data, cap, stages
):
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=2, max_size=count))
    found = pack(lengths, COST, cap, stages)
    best = min(
        pipeline_s([COST.micro_batch_s(np.array(lengths)[part]) for part in order], stages)
        for parts in partitions(list(range(len(lengths))))
        if all(sum(lengths[i] for i in part) <= cap for part in parts)
        for order in itertools.permutations(parts)
    )
    assert best * (1 - 1e-9) <= found.time_s <= 1.1 * best
    assert found.time_s <= found.upper_s * (1 + 1e-9)


def test_a_document_above_the_cap_is_named():
    with pytest.raises(SequenceTooLong, match="sequence 2: expected at most 50 tokens, got 60"):
        pack([10, 20, 60], COST, 50)


def test_nothing_packs_into_nothing():
    assert pack([], COST, 10).micro_batches == ()
