"""Merges are commutative monoids, whose split into parts changes neither rows nor gradients."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heta.combine import MERGES, Max, MaxState, Mean, Softmax, Stack, Sum, choose_merge
from shared.errors import ConfigError

ROWS, RELATIONS, DIM = 5, 4, 3


def outputs(seed=0, dtype=torch.float64):
    """Rows of each relation; many are equal."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (RELATIONS, ROWS, DIM), generator=random).to(dtype)


def lift(merge, rows, slot, share=None):
    """One relation's state, of some destinations if a share is given."""
    row = torch.arange(ROWS) if share is None else share.nonzero()[:, 0]
    return merge.lift(rows[row], row, ROWS, slot, RELATIONS)


def expected(name, rows):
    return {
        "sum": lambda: rows.sum(0),
        "mean": lambda: rows.mean(0),
        "max": lambda: rows.max(0)[0],
        "stack": lambda: rows.transpose(0, 1).flatten(1),
    }[name]()


def same(first, second):
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    return all(torch.equal(a, b) for a, b in pairs)


@given(st.permutations(range(RELATIONS)), st.integers(0, 2**RELATIONS - 1), st.integers(0, 9))
@pytest.mark.parametrize("name", ["sum", "mean", "max", "stack"])
def test_any_order_and_grouping_gives_the_rows_of_all_relations(name, order, grouping, seed):
    merge, rows = choose_merge(name), outputs(seed)
    states = [lift(merge, rows[i], i) for i in order]
    whole = reduce(merge.merge, states)
    left, right = [], []
    for i, state in enumerate(states):
        (left if grouping >> i & 1 else right).append(state)
    halves = [reduce(merge.merge, side) for side in (left, right) if side]
    assert same(reduce(merge.merge, halves), whole)
    assert same(reduce(merge.merge, halves[::-1]), whole)
    assert torch.allclose(merge.finalize(whole, RELATIONS), expected(name, rows))


@given(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), st.integers(0, 9))
@pytest.mark.parametrize("name", ["sum", "mean", "max", "stack"])
def test_a_relation_cut_by_destination_merges_to_the_whole(name, mask, seed):
    merge, rows, share = choose_merge(name), outputs(seed), torch.tensor(mask)
    rest = reduce(merge.merge, [lift(merge, rows[i], i) for i in range(1, RELATIONS)])
    parts = [merge.merge(rest, lift(merge, rows[0], 0, share)), lift(merge, rows[0], 0, ~share)]
    whole = merge.merge(rest, lift(merge, rows[0], 0))
    assert same(reduce(merge.merge, parts), whole)
    assert merge.out_dim(DIM, RELATIONS) == merge.finalize(whole, RELATIONS).shape[1]


@pytest.mark.parametrize("name", ["sum", "mean", "max", "stack"])
def test_gradients_routed_to_parts_are_those_of_the_whole(name):
    merge = choose_merge(name)
    weights = torch.randn(merge.out_dim(DIM, RELATIONS), dtype=torch.float64)
    whole, parted = (outputs().requires_grad_() for _ in range(2))
    (expected(name, whole) @ weights).square().sum().backward()
    parts = [[0, 2], [1], [3]]
    local = [reduce(merge.merge, [lift(merge, parted[i], i) for i in part]) for part in parts]
    detached = [
        MaxState(*(t.detach() for t in s)) if isinstance(s, tuple) else s.detach() for s in local
    ]
    merged = reduce(merge.merge, detached)
    for state in local:
        rows = merge.finalize(merge.route(state, merged), RELATIONS)
        (rows @ weights).square().sum().backward()
    assert torch.allclose(parted.grad, whole.grad)


@pytest.mark.parametrize("merge", [Sum(), Mean(), Max(), Stack()])
def test_rows_may_come_in_any_order(merge):
    rows, order = outputs()[0], torch.tensor([3, 0, 4, 1, 2])
    shuffled = merge.lift(rows[order], order, ROWS, 1, RELATIONS)
    assert same(shuffled, lift(merge, rows, 1))


def test_a_largest_value_of_several_relations_is_the_first_ones():
    merge = Max()
    rows = torch.ones(RELATIONS, ROWS, DIM)
    for order in (range(RELATIONS), reversed(range(RELATIONS))):
        state = reduce(merge.merge, [lift(merge, rows[i], i) for i in order])
        assert int(state.slots.max()) == 0
    empty = lift(merge, rows[1], 1, torch.zeros(ROWS, dtype=torch.bool))
    assert torch.isinf(empty.values).all()
    assert same(merge.merge(empty, state), state)


# softmax over edges


def edges(seed=0, num_edges=23, heads=2, dim=4):
    random = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(num_edges, heads, generator=random, dtype=torch.float64)
    values = torch.randn(num_edges, heads, dim, generator=random, dtype=torch.float64)
    # The last row has no edge.
    row = torch.randint(ROWS - 1, (num_edges,), generator=random)
    return logits, values, row


def plain_softmax(logits, values, row):
    rows = []
    for i in range(ROWS):
        chosen = row == i
        weights = logits[chosen].softmax(0)
        rows.append((weights[..., None] * values[chosen]).sum(0))
    return torch.stack(rows)


@given(st.lists(st.integers(0, 3), min_size=23, max_size=23), st.integers(0, 9))
def test_any_split_of_edges_gives_the_softmax_over_all(side, seed):
    merge, side = Softmax(), torch.tensor(side)
    logits, values, row = edges(seed)
    states = [
        merge.lift(logits[side == i], values[side == i], row[side == i], ROWS) for i in range(4)
    ]
    wanted = plain_softmax(logits, values, row)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        a, b, c, d = (states[i] for i in order)
        left = merge.merge(merge.merge(merge.merge(a, b), c), d)
        right = merge.merge(a, merge.merge(b, merge.merge(c, d)))
        for state in (left, right):
            assert torch.allclose(merge.finalize(state), wanted, rtol=1e-12, atol=1e-12)
    assert (merge.finalize(left)[-1] == 0).all()


def test_softmax_of_extreme_logits_is_finite():
    merge = Softmax()
    logits, values, row = edges()
    for shift in (1e4, -1e4):
        moved = logits + shift * (row % 2)[:, None]
        halves = [
            merge.lift(moved[side], values[side], row[side], ROWS)
            for side in (torch.arange(23) % 3 == 0, torch.arange(23) % 3 > 0)
        ]
        rows = merge.finalize(merge.merge(*halves))
        assert torch.allclose(rows, plain_softmax(moved, values, row))
    nothing = merge.lift(logits[:0], values[:0], row[:0], ROWS)
    assert (merge.finalize(merge.merge(nothing, nothing)) == 0).all()


def test_softmax_has_the_gradients_of_one_over_all_edges():
    merge = Softmax()
    inputs = edges(num_edges=11, dim=2)  # gradcheck goes through every entry
    logits, values, row = (t.requires_grad_(t.is_floating_point()) for t in inputs)
    sides = [torch.arange(11) % 3 == i for i in range(3)]

    def local(logits, values):
        return merge.finalize(
            reduce(merge.merge, [merge.lift(logits[s], values[s], row[s], ROWS) for s in sides])
        )

    assert torch.autograd.gradcheck(local, (logits, values))
    weights = torch.randn(ROWS, 2, 2, dtype=torch.float64)
    wanted = torch.autograd.grad(
        (plain_softmax(logits, values, row) * weights).square().sum(), (logits, values)
    )
    parts = [merge.lift(logits[s], values[s], row[s], ROWS) for s in sides]
    merged = reduce(merge.merge, [type(p)(*(t.detach() for t in p)) for p in parts])
    for part in parts:
        rows = merge.finalize(merge.route(part, merged))
        (rows * weights).square().sum().backward(retain_graph=True)
    assert torch.allclose(logits.grad, wanted[0])
    assert torch.allclose(values.grad, wanted[1])


def test_merges_are_chosen_by_name_or_given():
    assert [type(choose_merge(name)) for name in ("sum", "mean", "max", "softmax", "stack")] == [
        Sum, Mean, Max, Softmax, Stack,
    ]  # fmt: skip
    own = Stack(lambda rows: rows.sum(1), width=lambda dim, relations: dim + relations)
    assert choose_merge(own) is own
    assert own.out_dim(8, 3) == 11
    assert Stack(lambda rows: rows.sum(1)).out_dim(8, 3) == 8
    assert set(MERGES) == {"sum", "mean", "max", "softmax", "stack"}
    with pytest.raises(ConfigError, match=r"combine: expected one of sum, .*got <function"):
        choose_merge(lambda rows: rows)
