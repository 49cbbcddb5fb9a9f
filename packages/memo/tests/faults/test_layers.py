"""Layers that another forward would change: refused with a way out, and mode "whole" keeps them."""

import copy

import pytest
import torch
from torch import nn

from memo import apply
from shared.errors import ConfigError

from ..runtime.models import assert_same_step, make_stack, train_stack
from .steps import HALF, WHOLE

pytestmark = pytest.mark.unchecked  # models are trained


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(x.mul_(2)).sigmoid() * 3


def test_a_layer_that_changes_its_input_is_refused_with_a_way_out():
    model = make_stack(ChangesItsInput)
    expected = train_stack(model)
    with apply(model, HALF), pytest.raises(ConfigError, match="writes to its input in place"):
        train_stack(model)
    with apply(model, WHOLE):
        assert_same_step(train_stack(model), expected)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x):
        return x + self.norm(self.up(x).flatten(0, 1)).view_as(x).sigmoid()


def test_batch_norm_is_refused_while_it_trains_and_whole_keeps_it():
    model = make_stack(Normed)
    start = copy.deepcopy(model.state_dict())
    expected, after = train_stack(model), copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"writes to norm\."):
        train_stack(model)
    model.load_state_dict(start)
    with apply(model, WHOLE):
        assert_same_step(train_stack(model), expected)
    assert all(torch.equal(one, after[name]) for name, one in model.state_dict().items())
    model.eval()
    expected = train_stack(model)
    with apply(model, HALF):
        assert_same_step(train_stack(model), expected)


class OwnNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return x + (self.up(x) * noise).sigmoid()


def test_a_generator_of_a_layers_own_is_refused_and_whole_keeps_it():
    expected = train_stack(make_stack(OwnNoise))
    with (
        apply(model := make_stack(OwnNoise), HALF),
        pytest.raises(ConfigError, match="rand with a generator"),
    ):
        train_stack(model)
    with apply(model := make_stack(OwnNoise), WHOLE):
        assert_same_step(train_stack(model), expected)


class Alternating(nn.Module):
    """Takes another way each time that it is called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x + (self.down(self.up(x).sigmoid()) if self.count % 2 else self.up(x))


def test_a_layer_that_takes_another_way_is_noticed_and_whole_keeps_it():
    expected = train_stack(make_stack(Alternating))
    with (
        apply(model := make_stack(Alternating), HALF),
        pytest.raises(ConfigError, match="saved 3 tensors at first, and 1 the second"),
    ):
        train_stack(model)
    with apply(model := make_stack(Alternating), WHOLE):
        assert_same_step(train_stack(model), expected)
