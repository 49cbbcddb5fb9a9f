"""Parameters that are frozen, shared, adapted or changed in place, and activations that are changed."""

import pytest
import torch
from torch import nn

from memo import Plan, apply

from ..runtime.models import (
    Block,
    assert_same_step,
    make_input,
    make_model,
    make_stack,
    train,
    train_stack,
)
from .steps import BOTH, HALF, WHOLE, loss_of

pytestmark = pytest.mark.unchecked  # models are trained


@BOTH
@pytest.mark.parametrize("frozen", ["embedding", "first layers", "all but biases", "everything"])
def test_frozen_parameters(plan, frozen):
    model = make_model("gpt2")
    for name, parameter in model.named_parameters():
        is_early = "wte" in name or "wpe" in name or (".h.0." in name or ".h.1." in name)
        parameter.requires_grad_(
            {
                "embedding": "wte" not in name and "wpe" not in name,
                "first layers": not is_early,
                "all but biases": name.endswith("bias"),
                "everything": False,
            }[frozen]
        )
    if frozen == "everything":
        with apply(model, plan) as run:
            assert not loss_of(model).requires_grad
            assert run.store_bytes == 0
        return
    expected = train(model)
    with apply(model, plan):
        assert_same_step(train(model), expected)


@BOTH
def test_tied_embeddings(plan):
    model = make_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = train(model)
    with apply(model, plan):
        assert_same_step(train(model), expected)


class Adapted(nn.Module):
    """A frozen projection with a low-rank one beside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + 0.5 * self.up(self.down(x))


@BOTH
def test_low_rank_adapters(plan):
    model = make_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    expected = train(model)
    assert len(expected[1]) == 3 * 4
    with apply(model, plan):
        assert_same_step(train(model), expected)


@BOTH
def test_an_input_that_is_changed_after_its_layer_is_refused_as_by_autograd(plan):
    def step(model):
        x = model.first(make_input())
        y = model.layers[0](x)
        x.add_(1)
        y.sum().backward()

    model = make_stack()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with apply(model, plan), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


@BOTH
@pytest.mark.parametrize("name", ["up.weight", "norm.weight", "down.weight"])
def test_a_parameter_that_is_changed_before_the_backward_is_refused_as_by_autograd(plan, name):
    def step(model):
        loss = model(make_input())
        with torch.no_grad():
            model.layers[1].get_parameter(name).add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(make_stack())
    model = make_stack()
    with apply(model, plan), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


def test_a_changed_parameter_that_autograd_does_not_need_is_refused_where_it_is_run_again():
    """Plain autograd may not save a first layer's weight; running the layer again needs it."""
    model = make_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    with apply(model, HALF):
        loss = loss_of(model)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"self_attn.q_proj.weight is at version"):
            loss.backward()


def test_activations_in_place_are_recomputed():
    model = make_stack(lambda: Block(inner=lambda: nn.ReLU(inplace=True)))
    expected = train_stack(model)
    for plan in (Plan.fixed(alpha=1.0), HALF, WHOLE):
        with apply(model, plan):
            assert_same_step(train_stack(model), expected)
