"""A block split over two ranks, against the whole one's values and gradients in float64."""

import torch

from shared.comms import Group
from shared.comms.tensor_parallel import copy_to, sum_from


def drawn():
    """States, the two weights of a feed-forward net, and the loss's weights."""
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 6), (6, 8), (8, 6), (5, 6)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


def loss_and_gradients(states, up, down, slopes, group):
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


def strided_addends():
    """A sum of addends that do not lie in order, with a gradient that does not either."""
    group = Group.world()
    addend = (torch.arange(6.0).view(2, 3) + group.rank).t().requires_grad_()
    kept = addend.detach().clone()
    total = sum_from(addend, group)
    slopes = torch.arange(6.0).view(2, 3).t()
    (grad,) = torch.autograd.grad(total, addend, slopes)
    (copied,) = torch.autograd.grad(copy_to(addend, group), addend, slopes)
    assert torch.equal(addend, kept)
    return total.detach(), grad, copied


def test_a_split_block_has_the_whole_ones_loss_and_gradients(pool):
    loss, of_states, of_up, of_down = loss_and_gradients(*drawn(), None)
    for rank, found in enumerate(pool.run(on_a_shard).results):
        mine = slice(4 * rank, 4 * rank + 4)
        for part, wanted in zip(
            found, (loss, of_states, of_up[:, mine], of_down[mine]), strict=True
        ):
            torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-12)


def test_addends_of_any_strides_are_summed_and_left_as_they_are(pool):
    base = torch.arange(6.0).view(2, 3).t()
    for total, grad, copied in pool.run(strided_addends).results:
        assert torch.equal(total, 2 * base + 1)
        assert torch.equal(grad, base)
        assert torch.equal(copied, 2 * base)


def test_one_rank_alone_exchanges_nothing():
    values = torch.ones(3)
    assert copy_to(values, None) is values
    assert sum_from(values, None) is values
