"""Layers that go on with views of a product's result: gradients to the bit those of plain autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan

from .models import Stack, assert_same_step, make_input, train_stack

pytestmark = pytest.mark.unchecked  # models are trained

_WIDTH = 16


def written(part, value):
    """A part of a clone's memory, written in place."""
    copy = part.clone()
    copy[..., ::2].mul_(value)
    copy.narrow(-1, 0, 3).add_(1)
    return copy


def filled(wide):
    """A tensor whose parts are written one by one."""
    out = torch.zeros_like(wide[..., :_WIDTH])
    out[..., :8] = wide[..., :8]
    out.select(-1, 9).copy_(wide[..., 40])
    return out


def relu_of_part(wide):
    part = wide[..., 3 : 3 + _WIDTH]
    return part.relu_() * 2


# Of [2, 64, 48] each gives two tensors [2, 64, 16].
VIEWS = {
    "chunk": lambda wide: wide.chunk(3, -1)[:2],
    "split": lambda wide: wide.split([_WIDTH, 2 * _WIDTH], -1)[0].split(_WIDTH, -1) * 2,
    "split of split": lambda wide: [*wide.split(2 * _WIDTH, -1)[0].split(_WIDTH, -1)],
    "tensor_split": lambda wide: wide.tensor_split(3, dim=-1)[1:],
    "unbind": lambda wide: wide.view(2, 64, 3, _WIDTH).unbind(2)[:2],
    "unbind of rows": lambda wide: [torch.stack(wide.unbind(1)[::-1], 1)[..., :_WIDTH]] * 2,
    "select": lambda wide: [wide.view(2, 64, _WIDTH, 3).select(-1, number) for number in (0, 2)],
    "expand": lambda wide: [wide[..., :1].expand(-1, -1, _WIDTH), wide[..., 5:21]],
    "as_strided": lambda wide: [
        wide.as_strided((2, 64, _WIDTH), (64 * 48, 48, 2), 1),
        wide.as_strided((2, 64, _WIDTH), (64 * 48, 48, 1), 32),
    ],
    "narrow": lambda wide: [wide.narrow(-1, 7, _WIDTH), wide.narrow(1, 0, 1).narrow(-1, 0, _WIDTH) + wide[..., 32:]],
    "squeeze": lambda wide: [wide[..., None, :_WIDTH].squeeze(-2), wide.unsqueeze(0)[0, ..., 20:36]],
    "permute": lambda wide: [wide.permute(2, 0, 1)[:_WIDTH].permute(1, 2, 0), wide.mT[:, :_WIDTH].mT],
    "movedim": lambda wide: [wide.movedim(-1, 0)[8:24].movedim(0, -1), wide.swapaxes(0, 1)[..., :_WIDTH].transpose(0, 1)],
    "view_as_complex": lambda wide: [
        torch.view_as_real(torch.view_as_complex(wide.view(2, 64, 24, 2)) * (1 + 2j)).flatten(2)[..., :_WIDTH],
        torch.view_as_complex(wide.view(2, 64, 24, 2)).conj().imag[..., 4:20],
    ],
    "diagonal": lambda wide: [
        wide.view(2, 64, 3, _WIDTH).diagonal(0, 2, 3).sum(-1, keepdim=True) + wide[..., :_WIDTH],
        wide[..., :_WIDTH].diagonal(0, 1, 2)[:, None] * wide[..., :_WIDTH],
    ],
    "unfold": lambda wide: [wide.unfold(-1, 3, 3)[..., 1], wide.unfold(-1, _WIDTH, 8)[:, :, 2]],
    "views of views": lambda wide: [
        wide.view(128, 48)[:, 16:].reshape(2, 64, 2, 16)[:, :, 1].chunk(2, -1)[0].repeat(1, 1, 2),
        wide.chunk(3, -1)[1].unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2),
    ],
    "flip and roll": lambda wide: [wide.flip(-1)[..., :_WIDTH], wide.roll(1, 1)[..., :_WIDTH]],
    "gather and index": lambda wide: [wide[..., torch.arange(0, 48, 3)], wide[wide > -9].view(2, 64, 48)[..., :_WIDTH]],
    "in place on copies": lambda wide: [written(wide[..., :_WIDTH], 2.0), filled(wide)],
    "in place on a view": lambda wide: [relu_of_part(wide), wide[..., :_WIDTH]],
    "in place on the result": lambda wide: wide.mul_(2).add_(1).chunk(3, -1)[1:],
    "hsplit": lambda wide: [wide.flatten(0, 1).hsplit(3)[2].view(2, 64, _WIDTH), wide.unflatten(1, (8, 8)).flatten(1, 2).detach()[..., :_WIDTH]],
}  # fmt: skip


class Layer(nn.Module):
    """Views of one product, a second and a third product, and only then what uses the views."""

    def __init__(self, views):
        super().__init__()
        self.views = views
        self.norm, self.wide = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.gate, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x):
        left, right = self.views(self.wide(self.norm(x)))
        gate = self.gate(x)
        mixed = functional.scaled_dot_product_attention(left, gate, right)
        other, _ = self.down(mixed * left).sigmoid(), gate.chunk(2, -1)
        return x + torch.tanh(left) * right * gate + functional.layer_norm(other, (_WIDTH,)) * left


def make_layers(name):
    torch.manual_seed(0)
    return Stack([Layer(VIEWS[name]) for _ in range(2)], width=_WIDTH)


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_are_autograds_at_every_fraction(name):
    model = make_layers(name)
    expected = train_stack(model, width=_WIDTH, num_batches=1)
    plans = [Plan.fixed(alpha=alpha) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
    some = LayerPlan(mode="restore", resident=frozenset({"wide.weight"}), stored={"input": 1.0})
    for plan in (*plans, Plan(layers=(some,)), Plan(layers=(LayerPlan(mode="whole"),))):
        with apply(model, plan):
            assert_same_step(train_stack(model, width=_WIDTH, num_batches=1), expected)


def test_an_input_that_needs_a_gradient_gets_it_through_views():
    model, found = make_layers("chunk"), []
    for plan in (None, Plan.fixed(alpha=0.5)):
        x = make_input(width=_WIDTH).requires_grad_()
        if plan is None:
            model.layers[0](x).sum().backward()
        else:
            with apply(model, plan):
                model.layers[0](x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
