"""A block split over two ranks, against the whole one's values and gradients in float64."""

import pytest
import torch

from shared.comms import Group
from shared.comms.tensor_parallel import copy_to, sum_from


def drawn():
    """States, the two weights of a feed-forward net, and the loss's weights."""
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 6), (6, 8), (8, 6), (5, 6)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


def loss_and_gradients(states, up, down, slopes, group=None):
    """Of a residual block, whose states reach the loss both split and whole."""
    states, up, down = (part.clone().requires_grad_() for part in (states, up, down))
    block = torch.tanh(copy_to(states * 2, group) @ up) @ down
    loss = ((states + sum_from(block, group)) * slopes).sum()
    return loss.detach(), *torch.autograd.grad(loss, [states, up, down])


def on_a_shard():
    group = Group.world()
    states, up, down, slopes = drawn()
    mine = slice(4 * group.rank, 4 * group.rank + 4)
    return loss_and_gradients(states, up[:, mine], down[mine], slopes, group)


def exchanged(is_strided):
    """A sum of addends and a copy, the gradients of both, and the addend afterwards."""
    group = Group.world()
    addend = arranged(torch.arange(6.0) + group.rank, is_strided).requires_grad_()
    slopes = arranged(torch.arange(6.0), is_strided)
    total = sum_from(addend, group)
    (of_sum,) = torch.autograd.grad(total, addend, slopes)
    (of_copy,) = torch.autograd.grad(copy_to(addend, group), addend, slopes)
    return [part.detach() for part in (total, of_sum, of_copy, addend, slopes)]


def arranged(values, is_strided):
    return values.view(2, 3).t() if is_strided else values


def test_a_split_block_has_the_whole_ones_loss_and_gradients(pool):
    loss, of_states, of_up, of_down = loss_and_gradients(*drawn())
    for rank, found in enumerate(pool.run(on_a_shard).results):
        mine = slice(4 * rank, 4 * rank + 4)
        for part, wanted in zip(
            found, (loss, of_states, of_up[:, mine], of_down[mine]), strict=True
        ):
            torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_strided", [False, True])
def test_addends_are_summed_and_left_as_they_are(is_strided, pool):
    values = arranged(torch.arange(6.0), is_strided)
    for rank, found in enumerate(pool.run(exchanged, is_strided).results):
        total, of_sum, of_copy, addend, slopes = found
        assert torch.equal(total, 2 * values + 1)
        assert torch.equal(of_sum, values)
        assert torch.equal(of_copy, 2 * values)
        assert torch.equal(addend, values + rank)
        assert torch.equal(slopes, values)


def test_one_rank_alone_exchanges_nothing():
    values = torch.ones(3)
    assert copy_to(values, None) is values
    assert sum_from(values, None) is values
