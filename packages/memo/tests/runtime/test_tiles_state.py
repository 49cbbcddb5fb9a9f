"""Layers by tiles that depend on token-wise arguments again, or on more than their arguments."""

import pytest
import torch
from torch import nn

from memo import apply
from shared.errors import ConfigError

from .tiled_models import error_of, gradients_of, make_tiny, tiles, tiny_ids

pytestmark = pytest.mark.unchecked  # layers are run by many tiles


class Wrapped(nn.Module):
    """A Llama layer, and something after it."""

    factor = 1.0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def after(self, states, kwargs):
        return states * self.factor

    def forward(self, states, **kwargs):
        return self.after(self.inner(states, **kwargs), kwargs)


def wrap(after):
    kind = type("Wrapped", (Wrapped,), {"after": after})
    model = make_tiny()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = kind(layer)
    return model


def scale_by_angles(_, states, kwargs):
    cos, sin = kwargs["position_embeddings"]  # [1 or batch, tokens, width], a tuple of two
    return states * (1 + cos.mean(-1, keepdim=True)) + sin[..., :1]


def scale_by_positions(_, states, kwargs):
    return states * (1 + kwargs["position_ids"][..., None])


POSITIONS = torch.stack([torch.arange(37), torch.arange(37).flip(0)])


@pytest.mark.parametrize("after", [scale_by_angles, scale_by_positions])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["of all", "of each sequence"])
@pytest.mark.parametrize(
    "kept", [{"resident": frozenset(["input"])}, {}], ids=["input", "attention"]
)
def test_token_wise_arguments_that_are_used_after_attention_are_cut_too(after, positions, kept):
    model, ids = wrap(after), tiny_ids()
    inputs = {} if positions is None else {"position_ids": positions}
    wanted = gradients_of(model, ids, **inputs)
    with apply(model, tiles(30, **kept)):
        assert error_of(gradients_of(model, ids, **inputs), wanted) < 1e-12


def test_attributes_for_the_time_of_the_forward_are_there_again_in_the_backward():
    model, ids = wrap(Wrapped.after), tiny_ids()

    def step():
        model.zero_grad()
        for layer in model.model.layers:
            layer.factor = 3.0
        logits = model(input_ids=ids).logits
        for layer in model.model.layers:
            layer.factor = 1.0
        logits.square().mean().backward()
        return [logits.detach(), *(one.grad.clone() for one in model.parameters())]

    wanted = step()
    with apply(model, tiles(30)):
        assert error_of(step(), wanted) < 1e-12
    assert all(layer.factor == 1.0 for layer in model.model.layers)


class Elsewhere:
    factor = 1.0


def scale_by_elsewhere(_, states, kwargs):
    return states * Elsewhere.factor


@pytest.mark.parametrize("change", ["after", "before"])
def test_what_differs_in_the_backward_is_refused_by_name(monkeypatch, change):
    model, ids = wrap(scale_by_elsewhere if change == "after" else Wrapped.after), tiny_ids()
    if change == "before":
        for layer in model.model.layers:
            layer.inner.input_layernorm.register_forward_hook(
                lambda *given: given[2] * Elsewhere.factor
            )
    with apply(model, tiles(30)):
        loss = model(input_ids=ids).logits.square().mean()
        monkeypatch.setattr(Elsewhere, "factor", 1.5)
        part = "result" if change == "after" else "query"
        text = rf"^model\.layers\.1 \(Wrapped\): .*computes other values.*\({part} of tokens from 0 on\)"
        with pytest.raises(ConfigError, match=text):
            loss.backward()


def count(layer, states, kwargs):
    layer.calls = getattr(layer, "calls", 0) + 1
    return states


def remember(layer, states, kwargs):
    layer.states = states
    return states


def fill(layer, states, kwargs):
    layer.__dict__.setdefault("seen", []).append(1)
    return states


@pytest.mark.parametrize(
    ("after", "name"), [(count, "calls"), (remember, "states"), (fill, "seen")]
)
def test_layers_that_change_themselves_are_refused(after, name):
    """A tile is a part of a layer's call: a counter would count tiles."""
    model, ids = wrap(after), tiny_ids()
    with apply(model, tiles()), pytest.raises(ConfigError, match=rf"changes {name} while it runs"):
        model(input_ids=ids)
    assert not any(name in vars(layer) for layer in model.model.layers)
