"""Tiles in training loops that go wrong, and layers that cannot go by tiles."""

import gc

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from memo.planner.layer_plan import LayerPlan
from memo.runtime.run import apply
from shared.errors import ConfigError

from .tiled_models import CONFIGS, error_of, gradients_of, make_tiny, tiles, tiny_ids

pytestmark = pytest.mark.unchecked  # layers are run by many tiles


def test_slots_are_given_back_after_backward_and_after_dropped_forwards(tmp_path):
    model, ids = make_tiny(), tiny_ids()
    with apply(model, tiles(store=f"file:{tmp_path}")) as run:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        first = run.store_bytes
        loss = model(input_ids=ids, labels=ids).loss  # the old loss lived until here
        del loss
        gc.collect()
        gradients_of(model, ids, num_steps=2)
        assert run.store_bytes == first > 0


def test_a_retained_graph_runs_backward_twice_and_a_freed_one_does_not():
    model, ids = make_tiny(), tiny_ids()
    with apply(model, tiles()):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        once = [one.grad.clone() for one in model.parameters()]
        loss.backward()
        twice = [one.grad / 2 for one in model.parameters()]
        assert error_of(twice, once) < 1e-12
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_graphs_of_gradients_are_refused():
    model, ids = make_tiny(), tiny_ids()
    with apply(model, tiles()):
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)


def test_a_change_in_place_is_noticed():
    model, ids = make_tiny(), tiny_ids()
    states = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with apply(model, tiles(resident=frozenset(["input", "attention"]))):
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            states[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_exception_in_backward_leaves_the_model_as_it_was():
    model, ids = make_tiny(), tiny_ids()
    wanted = gradients_of(model, ids)
    before = dict(model.named_parameters())

    is_failing = []

    def fail(*_):
        if is_failing:
            raise KeyError("from a hook")

    with apply(model, tiles()):
        handle = model.model.layers[0].mlp.register_forward_pre_hook(fail)
        out = model(input_ids=ids).logits
        is_failing.append(True)
        with pytest.raises(KeyError):
            out.sum().backward()
        handle.remove()
        assert all(before[name] is one for name, one in model.named_parameters())
        assert error_of(gradients_of(model, ids), wanted) < 1e-12


class _Layer(nn.Module):
    """A Llama layer with something between."""

    def __init__(self, inner, extra):
        super().__init__()
        self.inner, self.extra = inner, extra

    def forward(self, states, **kwargs):
        return self.extra(self.inner(states, **kwargs))


class _MixTokens(nn.Module):
    def forward(self, states):
        return states + states.cumsum(1)


class _BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32, dtype=torch.float64)

    def forward(self, states):
        return self.norm(states.transpose(1, 2)).transpose(1, 2)


class _Capacity(nn.Module):
    """Experts with room for a fixed number of rows: others are dropped."""

    def forward(self, states):
        rows = states.flatten(0, 1)
        best = rows[:, 0].topk(5).indices
        return states + torch.zeros_like(rows).index_add(0, best, rows[best]).view_as(states)


class _Pair(nn.Module):
    def forward(self, states):
        return states, states.mean(-1)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (_MixTokens, "other values"),
        (_BatchNorm, "other values"),
        (_Capacity, "other values"),
        (lambda: nn.Dropout(0.5), "random numbers"),
        (_Pair, "tensors beside"),
    ],
)
def test_what_is_not_row_local_is_refused(extra, reason):
    model, ids = make_tiny(), tiny_ids()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = _Layer(layer, extra())
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    state = torch.get_rng_state()
    with (
        apply(model, tiles()),
        pytest.raises(ConfigError, match=f"^_Layer: .*{reason}.*mode 'restore'"),
    ):
        model(input_ids=ids)
    assert all(torch.equal(one, buffers[name]) for name, one in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


def test_layers_without_registered_attention_are_refused():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, dropout=0.0) for _ in range(2))
    model = nn.Module()
    model.layers = layers
    with (
        apply(model, tiles()),
        pytest.raises(ConfigError, match=r"TransformerEncoderLayer.*calls no"),
    ):
        layers[0](torch.randn(2, 5, 32))


def test_dropout_that_is_switched_on_later_is_refused():
    torch.manual_seed(0)
    config = CONFIGS["gpt2"]()
    config.resid_pdrop = 0.5
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tiny_ids()
    with apply(model, tiles()):
        model(input_ids=ids).logits.sum().backward()
        with pytest.raises(ConfigError, match=r"GPT2Block.*random numbers"):
            model.train()(input_ids=ids)


def test_dropout_that_is_raised_later_is_refused():
    """Without a change of mode: the forward itself notices."""
    model, ids = make_tiny(), tiny_ids()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = _Layer(layer, nn.Dropout(0.0))
    with apply(model, tiles()):
        gradients_of(model, ids)
        model.model.layers[1].extra.p = 0.5
        with pytest.raises(ConfigError, match=r"_Layer.*random numbers"):
            model(input_ids=ids)


def test_what_is_row_local_in_evaluation_alone_is_refused_in_training():
    """Batch norm, which draws no random numbers."""
    model, ids = make_tiny(), tiny_ids()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = _Layer(layer, _BatchNorm())
    with apply(model.eval(), tiles()):
        gradients_of(model, ids)
        with pytest.raises(ConfigError, match=r"_Layer.*other values"):
            model.train()(input_ids=ids)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "tiles"},
        {"mode": "restore", "tile_rows": 8},
        {"mode": "tiles", "tile_rows": -1},
        {"mode": "tiles", "tile_rows": 8, "default_fraction": 0.5},
        {"mode": "tiles", "tile_rows": 8, "stored": {"mlp.up_proj.weight": 1.0}},
    ],
)
def test_plans_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="tile"):
        LayerPlan(**settings)
