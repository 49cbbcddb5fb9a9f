"""Layers whose arguments change between the forward and the backward: gradients are right, or an error names them."""

import pytest
import torch

from memo import Plan, apply
from shared.errors import ConfigError

from ..runtime.models import Stack, assert_same_gradients, make_input
from .test_state import PLANS, Layer, build, steps

pytestmark = pytest.mark.unchecked  # models are trained


class Masked(Layer):
    def forward(self, x, mask, options):  # pyrefly: ignore
        factor = options.pop("factor", 1.0)
        return x + self.down(torch.tanh(self.up(x) * mask + factor))


class MaskedStack(Stack):
    """Gives its layers tensors and dictionaries which it changes afterwards."""

    is_writing_to_mask = False

    def forward(self, x):
        x, mask = self.first(x), torch.ones(16)
        for layer in self.layers:
            options = {"factor": 2.0}
            x = layer(x, mask, options=options)
            options["factor"] = 5.0
        if self.is_writing_to_mask:
            mask.zero_()
        return self.last(x).square().mean()


@PLANS
def test_arguments_that_the_caller_changes(plan):
    def make():
        torch.manual_seed(0)
        return MaskedStack([Masked() for _ in range(3)], width=16)

    model = make()
    expected = steps(make())
    with apply(model, plan):
        assert_same_gradients(steps(model)[1], expected[1])
        model.is_writing_to_mask = True
        # Autograd itself saved the mask, and notices.
        with pytest.raises((ConfigError, RuntimeError), match=r"argument '1'|inplace operation"):
            steps(model)


class Selects(Layer):
    def forward(self, x, mask):  # pyrefly: ignore
        return x + self.down(torch.tanh(self.up(x)[:, mask.nonzero()[:, 0]]).repeat(1, 2, 1))


def test_a_mask_that_is_changed_and_only_the_second_forward_reads_is_named():
    """Autograd saves what was made of it, and not the mask."""
    model, mask = build(Selects), torch.arange(64) % 2 == 0
    with apply(model, Plan.fixed(alpha=0.0)):
        out = model.layers[0](make_input(width=16), mask)
        mask.logical_not_()
        with pytest.raises(ConfigError, match="as argument '1' changed since"):
            out.sum().backward()
