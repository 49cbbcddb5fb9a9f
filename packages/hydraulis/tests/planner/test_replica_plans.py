"""Plans of unequal replicas beside brute force, and boxes beside counted elements."""

import functools
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydraulis as hy
from hydraulis.planner.proposals import exclusions
from hydraulis.planner.replicas import (
    ParameterPlacement,
    ReplicaLayout,
    cut_buckets,
    plan_replicas,
    rank_grids,
    read_strategy,
    stage_layers,
)
from shared.errors import ConfigError
from shared.topology.boxes import Box

COST = hy.Cost(a=1e-3, b=1e-1, c=0.5)


def read(text, num_layers=4):
    return read_strategy(text, cost=COST, max_tokens=100, num_layers=num_layers, message_s=0.01)


def test_a_strategy_names_replicas_in_the_order_of_their_ranks():
    found = read("tp2pp2+ring2ulysses2+cp2+tp1")
    assert [str(one) for one in found] == ["tp2pp2", "ring2ulysses2", "ring2", "tp1"]
    assert [one.cap for one in found] == [100, 400, 200, 100]
    assert found[0].cost == hy.Cost(a=1e-3 / 4, b=1e-1 / 4, c=0.5)
    assert found[1].cost == hy.Cost(a=1e-3 / 4, b=1e-1 / 4 + 0.01, c=0.5)
    assert found[3].cost == COST
    ranks = [rank for grid in rank_grids(found) for rank in grid.ravel().tolist()]
    assert ranks == list(range(11))
    assert read("pp3")[0].cost.a == pytest.approx(1e-3 / 2), "a stage has two of four layers"


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp2tp1", "tp2,tp1", "2tp", "tp2+", "cp2ring2"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="expected replicas joined by"):
        read(text)


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_share_all_layers(num_layers, stages):
    found = stage_layers(num_layers, stages)
    assert [layer for one in found for layer in one] == list(range(num_layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp4", "cannot share 2 key heads among 4 ranks"),
        ("tp2ulysses3", "cannot share 8 heads among 6 ranks"),
        ("pp5", "has more stages than the model has layers, 4"),
        ("tp16", "takes 16 ranks of 8"),
        ("tp2", "leaves a rank without any of 1 tokens of the vocabulary"),
    ],
)
def test_shapes_are_left_out_with_their_reason(text, reason):
    (shape,) = read(text)
    vocab = 1 if text == "tp2" else 10
    found = exclusions([shape], 8, num_heads=8, num_kv_heads=2, num_layers=4, vocab=vocab)
    assert found == {shape: reason}


def best_by_hand(lengths, candidates):
    """Least seconds over all candidates, dispatches, packings and orders that fit."""
    least = np.inf
    for shapes in candidates:
        for places in product(range(len(shapes)), repeat=len(lengths)):
            ends = []
            for replica, shape in enumerate(shapes):
                mine = [one for one, at in zip(lengths, places, strict=True) if at == replica]
                ends.append(packed_by_hand(tuple(sorted(mine)), shape))
            least = min(least, max(ends))
    return least


@functools.cache
def packed_by_hand(lengths, shape):
    if not lengths:
        return 0.0
    least = np.inf
    for places in product(range(len(lengths)), repeat=len(lengths)):
        parts = [
            [one for one, at in zip(lengths, places, strict=True) if at == k]
            for k in range(len(lengths))
        ]
        parts = [part for part in parts if part]
        if all(sum(part) <= shape.cap for part in parts):
            seconds = [shape.cost.micro_batch_s(part) for part in parts]
            least = min(least, hy.pipeline_s(seconds, shape.pp))
    return least


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=4))
def test_no_plan_is_below_the_bound_and_the_fastest_candidate_runs(lengths):
    candidates = [read("tp2+tp1+tp1"), read("pp2+tp2"), read("ring4")]
    plan = plan_replicas(lengths, candidates, 4)
    assert plan.bound_s <= best_by_hand(lengths, candidates) * (1 + 1e-9)
    assert plan.bound_s <= plan.makespan_s
    alone = [plan_replicas(lengths, [shapes], 4) for shapes in candidates]
    assert plan.makespan_s == min(one.makespan_s for one in alone)
    placed = sorted(at for replica in plan.micro_batches for part in replica for at in part)
    assert placed == list(range(len(lengths)))
    for shape, replica in zip(plan.shapes, plan.micro_batches, strict=True):
        assert all(sum(lengths[at] for at in part) <= shape.cap for part in replica)
    assert plan.digest == plan_replicas(lengths, candidates, 4).digest


def test_candidates_that_hold_no_document_are_passed_over():
    candidates = [read("tp1+tp1+tp1+tp1"), read("ring4")]
    assert plan_replicas([10] * 4, candidates, 4).candidate == 0
    assert plan_replicas([10, 101], candidates, 4).candidate == 1
    with pytest.raises(hy.SequenceTooLong, match="at most 400 tokens, got 401"):
        plan_replicas([10, 401], candidates, 4)
    with pytest.raises(ConfigError, match="expected documents and candidates, got 0 and 2"):
        plan_replicas([], candidates, 4)


STRATEGIES = ["tp2+tp1+tp1", "pp2+tp2", "tp2pp2", "ring2ulysses2", "tp4", "tp2", "pp3+tp1"]


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("sharing", ["cut", "whole", "parts", "first"])
@pytest.mark.parametrize(("shape", "layers"), [((7, 3), (1,)), ((2, 5), (-1, 4)), ((6,), (4,))])
def test_bytes_are_those_of_the_elements_that_ranks_lack(text, sharing, shape, layers):
    dim = len(shape) - 1
    one = ParameterPlacement(
        name="x", shape=shape, itemsize=4, layers=layers, sharing=sharing, dim=dim
    )
    layout = ReplicaLayout([one], read(text), 4, 4)
    whole = Box((0,) * len(shape), shape)

    def mark(box):
        found = np.zeros(shape, dtype=int)
        found[box.within(whole)] = 1
        return found

    owned, held = ([mark(box) for box in boxes] for boxes in (layout.owned(one), layout.held(one)))
    moved = layout.moved_bytes()
    # Every rank receives what it computes with and does not own, from the only rank that does.
    assert sum(moved.parameters) == 4 * sum(
        int((h & ~o & 1).sum()) for h, o in zip(held, owned, strict=True)
    )
    # Every addend arrives once where its element is owned.
    addends = np.zeros(shape, dtype=int)
    for rank in range(4):
        for transfers in layout.sum_transfers(one, rank):
            for src, dst, box in transfers:
                assert rank in (src, dst)
                addends += mark(box) * (dst == rank)
                assert (mark(box) <= held[src]).all()
                assert (mark(box) <= owned[dst]).all()
    assert (addends == count_addends(text, sharing, layers)).all()
    # What one rank counts on receiving, another one sends.
    for transfers_of in (
        lambda rank: layout.load_transfers(one, rank),
        lambda rank: [part for parts in layout.sum_transfers(one, rank) for part in parts],
    ):
        every = [transfers_of(rank) for rank in range(4)]
        sent = {t for rank, found in enumerate(every) for t in found if t.src == rank != t.dst}
        received = {t for rank, found in enumerate(every) for t in found if t.dst == rank != t.src}
        assert sent == received
        pairs = [(t.src, t.dst) for t in sent]
        assert len(pairs) == len(set(pairs)), "one box a pair, so that both ends pack it alike"


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 5), st.sampled_from([2, 4])),
        min_size=1, max_size=6,
    ),
    st.integers(1, 5),
    st.integers(1, 200),
)  # fmt: skip
def test_buckets_hold_each_row_once_and_few_bytes(drawn, num_ranks, most_bytes):
    parameters = [
        ParameterPlacement(
            name=str(number), shape=(rows, columns), itemsize=itemsize, layers=(0,), sharing="whole"
        )
        for number, (rows, columns, itemsize) in enumerate(drawn)
    ]
    layout = ReplicaLayout(parameters, [], 1, num_ranks)
    buckets = cut_buckets(parameters, num_ranks, most_bytes)
    counts = {one.name: np.zeros(one.shape[0], dtype=int) for one in parameters}
    for bucket in buckets:
        for rank in range(num_ranks):
            held = 0
            for piece in bucket:
                one = piece.parameter
                box = piece.rows(layout.owned(one)[rank])
                assert box.sizes[1] == one.shape[1]
                counts[one.name][box.offsets[0] : box.offsets[0] + box.sizes[0]] += 1
                held += box.numel * one.itemsize
            (first, *others) = [piece.parameter for piece in bucket]
            assert held <= most_bytes or (not others and held <= first.itemsize * first.shape[1])
    assert all((count == 1).all() for count in counts.values())
    order = [int(piece.parameter.name) for bucket in buckets for piece in bucket]
    assert order == sorted(order)


def test_the_bytes_of_thousands_of_ranks_are_found_at_once():
    parameters = [
        ParameterPlacement(
            name=str(layer), shape=(4096, 4096), itemsize=2, layers=(layer,), sharing="cut"
        )
        for layer in range(8)
    ]
    layout = ReplicaLayout(parameters, read("+".join(["tp8pp2"] * 64), 8), 8, 1024)
    begun = time.perf_counter()
    moved = layout.moved_bytes()
    assert time.perf_counter() - begun < 4
    whole = 8 * 4096 * 4096 * 2
    # 64 replicas lack all that is theirs but what their ranks own: of each parameter 1/1024 a rank.
    assert sum(moved.gradients) == sum(moved.parameters)
    assert 63 * whole < sum(moved.parameters) <= 64 * whole


def count_addends(text, sharing, layers):
    """Ranks of which each has another part of a sum: of a tensor-parallel team one or all."""
    found = 0
    for grid in rank_grids(read(text)):
        for stage, of_stage in enumerate(stage_layers(4, len(grid))):
            known = {*of_stage, *([-1] if not stage else []), *([4] if 3 in of_stage else [])}
            if known & set(layers):
                found += grid[stage].size // (1 if sharing == "parts" else grid.shape[-1])
    return found
