"""Outputs are compared bit for bit, or up to roundings of their largest element."""

import pytest
import torch

from lancet.runtime.verification import NUM_ROUNDINGS, find_difference

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("one", "other", "is_near"),
    [
        ([1.0, 1e-8], [1.0, 2e-8], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-4], False),
        ([0.0, -INF, INF], [0.0, -INF, INF], True),
        ([0.0, -INF], [0.0, INF], False),
        ([1.0, -INF], [1.0, -1e30], False),
        ([1.0, 5.0], [1.0, INF], False),
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, NAN], False),
        ([INF], [NAN], False),
        ([], [], True),
    ],
)
def test_roundings_are_those_of_the_largest_element(one, other, is_near):
    expected, output = torch.tensor(one), torch.tensor(other)
    lists = [None, 3, expected], [None, 3, output]
    assert (find_difference(*lists, num_roundings=NUM_ROUNDINGS) is None) == is_near
    has_same_bits = torch.equal(expected.view(torch.int32), output.view(torch.int32))
    assert (find_difference(*lists) is None) == has_same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_do_not_hide_faults(dtype):
    whole = torch.linspace(-2, 2, 65).to(dtype)
    assert find_difference([whole], [whole * 1.01], NUM_ROUNDINGS) is None
    for wrong in (torch.zeros_like(whole), whole * 1.1, -whole):
        assert find_difference([whole], [wrong], NUM_ROUNDINGS) == 0


def test_other_types_and_numbers_differ():
    whole = torch.tensor([1, 2])
    assert find_difference([whole, 1], [whole, 2], NUM_ROUNDINGS) == 1
    assert find_difference([whole], [whole + 1], NUM_ROUNDINGS) == 0
    assert find_difference([whole], [whole.float()], NUM_ROUNDINGS) == 0
