from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.kernels.route import reference, route


def count_one_by_one(experts, num_experts, used):
    """Slots and totals of choices by a dictionary of counts."""
    totals = Counter(dict(enumerate(used)))
    slots = []
    for expert in experts:
        slots.append(totals[expert])
        totals[expert] += 1
    return slots, [totals[expert] for expert in range(num_experts)]


def draw(num_tokens, k, num_experts, seed=0, dtype=torch.int64):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_experts, (num_tokens, k), generator=g).to(dtype)


@pytest.mark.parametrize("n", [0, 1, 7, 127, 128, 129, 1000])
@pytest.mark.parametrize("num_experts", [1, 5, 64, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_form_numbers_choices_in_order(form, n, num_experts, dtype):
    experts = draw(n, 1, num_experts, seed=n, dtype=dtype)[:, 0]
    used = torch.arange(num_experts) * 3 % 7
    expected = count_one_by_one(experts.tolist(), num_experts, used.tolist())
    here = experts.to(form.device), used.to(form.device)
    for module in (form.of("route"), reference):
        slots, totals = module.route(*here)
        assert (slots.dtype, totals.dtype) == (torch.int64, torch.int64)
        assert (slots.tolist(), totals.tolist()) == expected
    assert here[1].tolist() == used.tolist()


def test_every_form_takes_all_tokens_of_one_expert(form):
    experts = torch.full((500,), 2, device=form.device)
    slots, totals = form.of("route").route(experts, torch.zeros(4, dtype=torch.int64).to(experts))
    assert slots.tolist() == list(range(500))
    assert totals.tolist() == [0, 0, 500, 0]


@given(
    num_tokens=st.integers(0, 30),
    k=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    seed=st.integers(0, 10**6),
)
def test_parts_get_the_slots_of_the_whole(num_tokens, k, num_experts, cuts, seed):
    experts = draw(num_tokens, k, num_experts, seed)
    slots, totals = route(experts, num_experts)
    assert totals.sum() == num_tokens * k
    # Each expert's slots are a permutation of 0, 1, ..., in the order of tokens.
    for expert in range(num_experts):
        assert slots[experts == expert].tolist() == list(range(int(totals[expert])))
    bounds = sorted(min(cut, num_tokens) for cut in cuts)
    used, parts = None, []
    for first, stop in zip([0, *bounds], [*bounds, num_tokens], strict=True):
        part, used = route(experts[first:stop], num_experts, used)
        parts.append(part)
    assert torch.equal(torch.cat(parts), slots)
    assert torch.equal(used, totals)


def test_a_tokens_choices_are_in_order():
    experts = torch.tensor([[1, 0], [0, 1], [1, 1]])
    slots, totals = route(experts, 3, torch.tensor([10, 20, 30]))
    assert slots.tolist() == [[20, 10], [11, 21], [22, 23]]
    assert totals.tolist() == [12, 24, 30]


def test_strides_and_read_only_inputs_are_taken():
    experts = draw(40, 6, 8)
    used = torch.arange(8)
    expected = route(experts[:, ::2].contiguous(), 8, used)
    before = experts.clone()
    strided = torch.stack([used, used], 1)[:, 0]
    for ours, theirs in zip(route(experts[:, ::2], 8, strided), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(experts, before)
    assert used.tolist() == list(range(8))


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_expert_outside_its_range_is_refused(bad):
    experts = torch.tensor([[0, 1], [3, bad]])
    with pytest.raises(DataError, match=rf"experts in \[0, 4\), got {bad} at choice 3"):
        route(experts, 4)


def test_other_types_and_shapes_are_refused():
    # Signatures are checked in tests, and refuse these with a sentence of their own.
    raw = getattr(route, "__wrapped__", route)
    with pytest.raises(DataError, match=r"int32 or int64 \[tokens, k\], got torch.int16 \[2, 2\]"):
        raw(torch.zeros(2, 2, dtype=torch.int16), 3)
    with pytest.raises(DataError, match=r"int32 or int64 \[tokens, k\], got torch.int64 \[2\]"):
        raw(torch.zeros(2, dtype=torch.int64), 3)
    for used in (torch.zeros(2, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(DataError, match=r"used to be torch.int64 \[3\], got"):
            raw(torch.zeros(2, 2, dtype=torch.int64), 3, used)
