"""Layers that another forward would change: refused with a way out, and mode "whole" keeps them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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

    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        Alternating.calls += 1
        return x + (self.down(self.up(x).sigmoid()) if Alternating.calls % 2 else self.up(x))


def test_a_layer_that_takes_another_way_is_noticed_and_whole_keeps_it(monkeypatch):
    monkeypatch.setattr(Alternating, "calls", 0)
    expected = train_stack(make_stack(Alternating))
    with (
        apply(model := make_stack(Alternating), HALF),
        pytest.raises(ConfigError, match=r"layers.2 \(Alternating\): .*the second"),
    ):
        train_stack(model)
    monkeypatch.setattr(Alternating, "calls", 0)
    with apply(model := make_stack(Alternating), WHOLE):
        assert_same_step(train_stack(model), expected)


class EndsWithAttention(nn.Module):
    """Saves nothing after its attention, which saves no more than it is given."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="gate")
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        attend = ALL_ATTENTION_FUNCTIONS["gate"]
        heads = [one[:, None] for one in (self.query(x), self.key(x), x)]
        return x + attend(self, *heads)[0][:, :, 0]


def gate(module, query, key, value):
    return (query * key).transpose(1, 2), None


def test_attention_that_saves_nothing_of_its_own_may_be_the_last_to_save(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "gate", gate)
    model = make_stack(EndsWithAttention)
    expected = train_stack(model)
    for plan in (HALF, WHOLE):
        with apply(model, plan):
            assert_same_step(train_stack(model), expected)


@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 8, 32)])
@pytest.mark.parametrize("plan", [HALF, WHOLE])
def test_batches_without_tokens_or_rows_train_as_without_a_plan(plan, shape):
    def step(model):
        x = torch.randn(shape)
        loss = model.last(model.layers[0](model.first(x))).square().sum()
        loss.backward()
        return [loss.item()], {name: p.grad for name, p in model.layers[0].named_parameters()}

    expected = step(make_stack())
    assert expected[0] == [0.0]
    model = make_stack()
    with apply(model, plan):
        assert_same_step(step(model), expected)
