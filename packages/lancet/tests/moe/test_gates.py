import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet.moe.gates import GATES, assign_slots, balance_loss, capacity
from shared.errors import ConfigError, DataError


def fill_one_by_one(experts, num_experts, capacity, used=None):
    """Slots by taking one token after another."""
    used = list(used) if used is not None else [0] * num_experts
    slots = []
    for choices in experts:
        row = []
        for expert in choices:
            is_free = used[expert] < capacity
            row.append(used[expert] if is_free else -1)
            used[expert] += is_free
        slots.append(row)
    return slots, used


@st.composite
def choices(draw):
    num_experts, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    expert = st.integers(0, num_experts - 1)
    rows = draw(st.lists(st.lists(expert, min_size=k, max_size=k), max_size=25))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, k), num_experts


@given(
    num_tokens=st.integers(0, 10_000),
    num_experts=st.integers(1, 300),
    k=st.integers(1, 8),
    factor=st.decimals("0.01", "20", places=2),
)
def test_capacity_is_the_exact_quotient_rounded_up(num_tokens, num_experts, k, factor):
    slots = capacity(num_tokens, num_experts, float(factor), k)
    exact = Fraction(factor) * k * num_tokens
    assert slots * num_experts >= exact
    assert (slots - 1) * num_experts < exact
    if factor == 1:
        assert slots == math.ceil(Fraction(k * num_tokens, num_experts))


def test_capacity_of_a_batch_is_not_that_of_its_parts():
    assert capacity(10, 4, 1.0) == 3
    assert 2 * capacity(5, 4, 1.0) == 4
    # In floating point 1.1 * 100 is 110.00000000000001.
    assert capacity(100, 1, 1.1) == 110
    assert capacity(0, 4, 1.25) == 0


@pytest.mark.parametrize(
    "arguments", [(-1, 4, 1.0), (5, 0, 1.0), (5, 4, 0.0), (5, 4, math.inf), (5, 4, math.nan)]
)
def test_bad_settings_of_a_capacity_are_refused(arguments):
    with pytest.raises(ConfigError, match="expected num_"):
        capacity(*arguments)
    with pytest.raises(ConfigError, match="k of 1 or more"):
        capacity(5, 4, 1.0, k=0)


@given(choices(), st.integers(0, 8), st.data())
def test_slots_are_taken_in_order_until_none_is_left(chosen, slots_each, data):
    experts, num_experts = chosen
    count = st.integers(0, slots_each)
    used = data.draw(st.lists(count, min_size=num_experts, max_size=num_experts))
    expected = fill_one_by_one(experts.tolist(), num_experts, slots_each, used)
    slots, totals = assign_slots(experts, num_experts, slots_each, torch.tensor(used))
    assert (slots.tolist(), totals.tolist()) == expected
    slots, totals = assign_slots(experts, num_experts, slots_each)
    assert (slots.tolist(), totals.tolist()) == fill_one_by_one(
        experts.tolist(), num_experts, slots_each
    )


@given(choices(), st.integers(0, 8), st.lists(st.integers(0, 25), max_size=4))
def test_parts_drop_the_tokens_of_the_whole(chosen, slots_each, cuts):
    experts, num_experts = chosen
    slots, totals = assign_slots(experts, num_experts, slots_each)
    bounds = sorted(min(cut, len(experts)) for cut in cuts)
    used, parts = None, []
    for first, stop in zip([0, *bounds], [*bounds, len(experts)], strict=True):
        part, used = assign_slots(experts[first:stop], num_experts, slots_each, used)
        parts.append(part)
    assert torch.equal(torch.cat(parts), slots)
    assert torch.equal(used, totals)


def test_all_tokens_of_one_expert_keep_the_first_ones():
    slots, used = assign_slots(torch.full((9, 1), 2), 4, 5)
    assert slots[:, 0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1]
    assert used.tolist() == [0, 0, 5, 0]


def test_bad_slots_are_refused():
    experts = torch.tensor([[0], [1]])
    with pytest.raises(DataError, match=r"0 to the capacity of 3, got 0 to 4; give every part"):
        assign_slots(experts, 2, 3, torch.tensor([0, 4]))
    with pytest.raises(DataError, match=r"0 to the capacity of 3, got -1 to 0"):
        assign_slots(experts, 2, 3, torch.tensor([0, -1]))
    with pytest.raises(DataError, match=r"experts in \[0, 2\), got 2 at choice 1"):
        assign_slots(torch.tensor([[0], [2]]), 2, 3)
    raw = getattr(assign_slots, "__wrapped__", assign_slots)
    with pytest.raises(DataError, match=r"slots of 2 experts, got shape \[3\]"):
        raw(experts, 2, 3, torch.zeros(3, dtype=torch.int64))


def test_a_compiler_takes_slots_as_one_operator():
    operator = torch.ops.lancet.assign_slots.default
    example = torch.tensor([[0], [2]]), torch.zeros(3).long(), 4
    torch.library.opcheck(operator, example, test_utils=("test_schema", "test_faketensor"))


def draw(num_tokens=40, num_experts=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=g)
    return logits, torch.randint(0, 1000, (num_tokens,), generator=g)


def run(name, logits, ids, k=1, slots_each=4):
    return GATES.get(name).route(logits, ids, k, slots_each)


@pytest.mark.parametrize("name", GATES.names())
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_gate_fills_each_slot_at_most_once(name, k):
    if (GATES.get(name).max_k or k) < k:
        return
    logits, ids = draw()
    routing = run(name, logits, ids, k, slots_each=6)
    assert routing.experts.shape == routing.slots.shape == routing.weights.shape
    kept = routing.slots >= 0
    assert int(routing.slots.max()) < 6
    pairs = list(zip(routing.experts[kept].tolist(), routing.slots[kept].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    # Slots of an expert are taken from 0 upwards, and none is free while a choice is dropped.
    for expert in range(8):
        mine = routing.slots[routing.experts == expert]
        count = int((mine >= 0).sum())
        assert sorted(mine[mine >= 0].tolist()) == list(range(count))
        if name != "expert_choice":
            assert count == min(6, len(mine))
    for row in routing.experts.tolist():
        assert len(set(row)) == len(row)


def test_switch_and_top_k_choose_the_likeliest():
    logits, ids = draw()
    probabilities = logits.double().softmax(1)
    routing = run("switch", logits, ids)
    assert torch.equal(routing.experts[:, 0], logits.argmax(1))
    expected = probabilities.amax(1, keepdim=True).float()
    torch.testing.assert_close(routing.weights, expected)
    routing = run("top_k", logits, ids, k=3)
    for row, experts, weights in zip(probabilities, routing.experts, routing.weights, strict=True):
        order = sorted(range(8), key=lambda expert: -row[expert])[:3]
        assert experts.tolist() == order
        torch.testing.assert_close(weights, (row[order] / row[order].sum()).float())
    assert fill_one_by_one(routing.experts.tolist(), 8, 4)[0] == routing.slots.tolist()


def test_the_batchs_surest_tokens_are_kept():
    logits = torch.tensor([[2.0, 0.0], [5.0, 0.0], [3.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    routing = run("batch_prioritized", logits, torch.arange(5), slots_each=2)
    assert routing.experts[:, 0].tolist() == [0, 0, 0, 0, 1]
    assert routing.slots[:, 0].tolist() == [-1, 0, -1, 1, 0]


def test_an_expert_chooses_its_likeliest_tokens():
    logits, ids = draw(num_tokens=11, num_experts=3)
    routing = run("expert_choice", logits, ids, slots_each=4)
    probabilities = logits.double().softmax(1)
    for expert in range(3):
        order = sorted(range(11), key=lambda token: -probabilities[token, expert])
        slots = [order.index(token) if order.index(token) < 4 else -1 for token in range(11)]
        assert routing.slots[:, expert].tolist() == slots
    torch.testing.assert_close(routing.weights, probabilities.float())
    # There are fewer tokens than slots.
    assert (run("expert_choice", logits, ids, slots_each=20).slots >= 0).all()


def test_hashed_experts_follow_the_tokens_id_alone():
    logits, _ = draw(num_tokens=6000)
    ids = torch.arange(6000) % 3000
    routing = run("hash", logits, ids, k=2, slots_each=6000)
    assert torch.equal(routing.experts[:3000], routing.experts[3000:])
    part = run("hash", logits[100:200], ids[100:200], k=2, slots_each=6000)
    assert torch.equal(part.experts, routing.experts[100:200])
    assert routing.weights.unique().tolist() == [0.5]
    # 6,000 choices of 3,000 ids: 750 an expert, with a standard deviation of 24.
    counts = routing.experts[:3000].reshape(-1).bincount()
    assert (counts - 750).abs().max() < 120


def test_random_experts_are_new_in_every_call_and_even():
    logits, ids = draw(num_tokens=4000)
    first, second = (run("random", logits, ids, k=2, slots_each=4000).experts for _ in range(2))
    # Two of eight experts in common, on average a quarter of the choices.
    shared = (first[:, :, None] == second[:, None]).any(2).float().mean()
    assert abs(float(shared) - 0.25) < 0.04
    assert (first.reshape(-1).bincount() - 1000).abs().max() < 150
    torch.manual_seed(3)
    again = run("random", logits, ids, k=2, slots_each=4000).experts
    torch.manual_seed(3)
    assert torch.equal(again, run("random", logits, ids, k=2, slots_each=4000).experts)


@pytest.mark.parametrize("k", [1, 4, 5, 8])
def test_drawn_experts_differ_and_every_set_is_drawn(k):
    logits, _ = draw(num_tokens=2000)
    experts = run("hash", logits, torch.arange(2000), k=k, slots_each=2000).experts
    assert experts.shape == (2000, k)
    sets = {frozenset(row) for row in experts.tolist()}
    assert {len(each) for each in sets} == {k}
    assert len(sets) == math.comb(8, k)


def test_the_balance_loss_is_1_for_even_choices_and_the_number_of_experts_for_one():
    even = torch.arange(12)[:, None] % 4
    assert float(balance_loss(torch.zeros(12, 4), even)) == pytest.approx(1.0)
    logits = torch.full((12, 4), -30.0)
    logits[:, 2] = 30.0
    assert float(balance_loss(logits, torch.full((12, 1), 2))) == pytest.approx(4.0)
    logits = torch.randn(12, 4, requires_grad=True)
    experts = logits.topk(2).indices
    shares = [float((experts == expert).sum()) / 24 for expert in range(4)]
    means = logits.double().softmax(1).mean(0).tolist()
    loss = balance_loss(logits, experts)
    assert loss.item() == pytest.approx(4 * sum(map(math.prod, zip(shares, means, strict=True))))
    loss.backward()
    assert logits.grad.abs().sum() > 0
