"""The loss in blocks against the model's own, in float64."""

import inspect
import logging

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.runtime.block_loss import has_block_loss
from memo.runtime.run import apply

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "head_dim": 8,
}
_CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in _SIZES.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**_SIZES),
    "gpt2": lambda: GPT2Config(
        n_embd=16,
        n_layer=1,
        n_head=2,
        vocab_size=61,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
_PLAN = Plan(layers=(LayerPlan(),), has_block_loss=True)


def _model(name="llama"):
    torch.manual_seed(0)
    config = _CONFIGS[name]()
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).double().train()


def _batch():
    ids = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = labels[1, 4] = -100
    return ids, labels


def _results(model, labels, out_loss):
    model.zero_grad()
    loss = out_loss(model)
    loss.backward()
    return [loss.detach().double(), *(one.grad.clone() for one in model.parameters())]


def _close(found, wanted):
    return all(
        torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("count", [None, 50, torch.tensor(50)])
@pytest.mark.parametrize("name", _CONFIGS)
def test_loss_and_gradients_are_those_of_all_logits(name, count):
    model, (ids, labels) = _model(name), _batch()

    def plain(model):  # the model's own loss rounds logits to float32
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(
            logits, labels[:, 1:].flatten(), reduction="mean" if count is None else "sum"
        )
        return loss if count is None else loss / count

    def own(model):
        return model(input_ids=ids, labels=labels, num_items_in_batch=count).loss

    wanted = _results(model, labels, plain)
    assert torch.allclose(own(model).double(), wanted[0], rtol=1e-6)
    with apply(model, _PLAN):
        out = model(input_ids=ids, labels=labels, num_items_in_batch=count)
        assert out.logits is None
        assert _close(_results(model, labels, own), wanted)


def test_everything_is_as_before_afterwards():
    model, (ids, labels) = _model(), _batch()
    signature = inspect.signature(model.forward)
    with apply(model, _PLAN):
        assert inspect.signature(model.forward) == signature
        model(input_ids=ids, labels=labels).loss.backward()
        assert model(input_ids=ids).logits is not None
        with torch.no_grad():
            assert model(input_ids=ids, labels=labels).logits is not None
    assert "forward" not in vars(model)
    assert model(input_ids=ids, labels=labels).logits is not None


def test_of_several_models_in_one_none_has_its_loss_computed_in_blocks():
    assert has_block_loss(nn.ModuleList([_model()]))
    assert not has_block_loss(nn.ModuleList([_model(), _model()]))


def test_a_loss_of_ones_own_is_left_alone(caplog):
    model, (ids, labels) = _model(), _batch()
    model.loss_function = lambda logits, **_: logits.sum()
    with caplog.at_level(logging.INFO), apply(model, _PLAN):
        assert model(input_ids=ids, labels=labels).logits is not None
    assert "loss function of its own" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        lambda ids, labels: {"labels": labels, "shift_labels": labels.roll(3, 1)},
        lambda ids, labels: {"labels": ids, "ignore_index": int(ids[0, 3])},
        lambda ids, labels: {"labels": labels.roll(3, 1)},
    ],
    ids=["shifted already", "another mark of ignored tokens", "the first token counts for nothing"],
)
def test_labels_are_read_as_the_models_own_loss_does(given):
    model, (ids, labels) = _model(), _batch()
    wanted = model(input_ids=ids, **given(ids, labels)).loss
    with apply(model, _PLAN):
        found = model(input_ids=ids, **given(ids, labels))
    assert found.logits is None
    assert torch.allclose(found.loss.double(), wanted.double(), rtol=1e-6)


def test_where_only_some_logits_are_asked_for_they_are_made():
    model, (ids, labels) = _model(), _batch()
    given = {"input_ids": ids, "labels": labels[:, -5:], "logits_to_keep": 5}
    wanted = model(**given)
    with apply(model, _PLAN):
        found = model(**given)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)


def test_autocast_rounds_the_head_as_it_does_a_linear_layer():
    model, (ids, labels) = _model().float(), _batch()

    def step():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.item(), model.lm_head.weight.grad.clone()

    wanted, gradient = step()
    with apply(model, _PLAN):
        found, same = step()
    assert found == pytest.approx(wanted, rel=2e-3)
    assert same.dtype == torch.float32
    assert (same - gradient).norm() < 2e-2 * gradient.norm()
