"""A side's noise, widths and state: moving averages by hand, and what a checkpoint gives back."""

import pytest
import torch

from adaqp.messages.channel import ChannelSide, noise_per_step_sq
from adaqp.partitioning.part import RowRoute


@pytest.fixture
def side():
    """Rows 0 and 2 of three are sent to rank 1, which sends one."""
    route = RowRoute(torch.tensor([0, 2]), send_offsets=[0, 0, 2], recv_offsets=[0, 0, 1])
    return ChannelSide.uniform("forward0", route, 8)


def test_ranges_are_averaged_with_the_weight_of_the_past(side):
    x = torch.zeros(3, 5, dtype=torch.float64)
    side.observe(torch.tensor([2.0, 3.0]), x, 0.9)
    assert side.spread_sq.tolist() == [4, 9]
    side.observe(torch.tensor([4.0, 0.0]), x, 0.9)
    assert side.spread_sq.tolist() == pytest.approx([0.9 * 4 + 0.1 * 16, 0.9 * 9])
    assert (side.dim, side.itemsize) == (5, 8)


def test_noise_counts_receivers_weights_and_columns_between_the_ends(side):
    side.alpha_sq = torch.tensor([1.0, 0.5])
    side.observe(torch.tensor([2.0, 3.0]), torch.zeros(3, 8), 0.9)
    # A column's variance is 1/6 of a squared step, and two of eight lie on levels.
    assert side.beta().tolist() == pytest.approx([4 * 6 / 6, 0.5 * 9 * 6 / 6])
    assert [noise_per_step_sq(dim) for dim in (1, 2, 3)] == [0, 0, 1 / 6]


def test_a_new_assignment_lays_out_new_buffers(side):
    x = torch.zeros(3, 5)
    before = side.sent(1, x, torch.float32)
    assert side.sent(1, x, torch.float32) is before
    side.set_bits(torch.tensor([2, 2], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8))
    after = side.sent(1, x, torch.float32)
    assert after.num_bytes < before.num_bytes
    assert side.version == 1


def test_a_side_is_what_its_state_says(side):
    side.set_bits(torch.tensor([2, 4], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8))
    side.hidden_s = 0.25
    for spread in (None, torch.tensor([2.0, 3.0])):
        if spread is not None:
            side.observe(spread, torch.zeros(3, 5, dtype=torch.float64), 0.9)
        state = side.state()
        again = ChannelSide.from_state("forward0", state, side.route)
        assert (again.version, again.hidden_s) == (1, 0.25)
        assert (again.dim, again.itemsize) == (side.dim, side.itemsize)
        assert again.send_bits.tolist() == [2, 4]
        assert again.recv_bits.tolist() == [8]
        assert again.state().keys() == state.keys()
        assert all(torch.equal(again.state()[name], one) for name, one in state.items())
