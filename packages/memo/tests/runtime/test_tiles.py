"""Layers by tiles against plain autograd, in float64 and within twice plain float32's own error."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.runtime.run import apply
from shared.errors import ConfigError

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=16),
    "gpt2": lambda: GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=61,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
_STORED = {"input": 1.0, "attention": 1.0}


def _model(name="llama", dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def _ids(batch=2, tokens=37):
    return torch.randint(0, 61, (batch, tokens), generator=torch.Generator().manual_seed(1))


def _gradients(model, ids, num_steps=1, **inputs):
    model.zero_grad()
    for _ in range(num_steps):
        # The model's own loss rounds logits to float32.
        logits = model(input_ids=ids, **inputs).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def _plan(tile_rows=16, store="memory", **kept):
    layer = LayerPlan(mode="tiles", tile_rows=tile_rows, **(kept or {"stored": _STORED}))
    return Plan(layers=(layer,), store=store)


def _error(found, wanted):
    return max(
        ((one.double() - other).norm() / other.norm()).item()
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "tile_rows"),
    [*((name, rows) for name in CONFIGS for rows in (30, 1000)), ("llama", 1), ("gpt2", 16)],
)
def test_gradients_are_plain_autograds(name, tile_rows):
    model, ids = _model(name), _ids(tokens=37 if tile_rows > 1 else 9)
    wanted = _gradients(model, ids)
    with apply(model, _plan(tile_rows)) as run:
        found = _gradients(model, ids)
        assert run.num_restored == 2
    assert _error(found, wanted) < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_errs_at_most_twice_as_much_as_plain(name):
    exact, ids = _model(name), _ids(1, 120)
    wanted = _gradients(exact, ids)
    model = copy.deepcopy(exact).float()
    plain = _error(_gradients(model, ids), wanted)
    with apply(model, _plan(16)):
        found = _error(_gradients(model, ids), wanted)
    assert 0 < found <= 2 * plain


@pytest.mark.parametrize(
    "kept",
    [
        {"resident": frozenset(["input"])},
        {"resident": frozenset(["input", "attention"])},
        {"stored": {"input": 1.0}},
        {"stored": {"input": 1.0}, "resident": frozenset(["attention"])},
        {"stored": _STORED},
    ],
)
def test_whatever_is_kept_gradients_are_the_same(kept, tmp_path):
    model, ids = _model(), _ids()
    wanted = _gradients(model, ids, num_steps=3)
    with apply(model, _plan(store=f"file:{tmp_path}", **kept)) as run:
        assert _error(_gradients(model, ids, num_steps=3), wanted) < 1e-12
        assert bool(run.store_bytes) == ("stored" in kept)


def test_masks_reach_attention_whole():
    model, ids = _model(), _ids()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    wanted = _gradients(model, ids, attention_mask=mask)
    with apply(model, _plan()):
        assert _error(_gradients(model, ids, attention_mask=mask), wanted) < 1e-12


def test_attention_that_returns_weights_is_computed_again():
    model, ids = _model(attention="eager"), _ids()
    wanted = _gradients(model, ids)
    with apply(model, _plan()):
        assert _error(_gradients(model, ids), wanted) < 1e-12


def test_bfloat16_and_autocast():
    model, ids = _model(dtype=torch.float32), _ids(1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = _gradients(model, ids)
        with apply(model, _plan()):
            found = _gradients(model, ids)
    assert _error(found, [one.double() for one in wanted]) < 3e-2
    assert all(one.dtype == torch.float32 for one in found[1:])


def test_frozen_parameters_get_no_gradient():
    model, ids = _model(), _ids()
    for name, one in model.named_parameters():
        one.requires_grad_("q_proj" in name or "down_proj" in name)
    trained = [one for one in model.parameters() if one.requires_grad]

    def gradients():
        model.zero_grad()
        model(input_ids=ids).logits.pow(2).mean().backward()
        return [one.grad.clone() for one in trained]

    wanted = gradients()
    with apply(model, _plan()):
        assert _error(gradients(), wanted) < 1e-12
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


def test_hooks_on_parameters_see_the_sum_once():
    model, ids = _model(), _ids()
    wanted = _gradients(model, ids)
    seen = []
    with apply(model, _plan()):
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one: seen.append(one))
        assert _error(_gradients(model, ids), wanted) < 1e-12
    assert len(seen) == len(set(seen)) == len(list(model.parameters()))


def test_parameters_are_the_models_own_afterwards():
    model, ids = _model(), _ids()
    before = dict(model.named_parameters())
    with apply(model, _plan()):
        _gradients(model, ids)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[one] is before[one] for one in before)


def test_slots_are_given_back_after_backward_and_after_dropped_forwards(tmp_path):
    model, ids = _model(), _ids()
    with apply(model, _plan(store=f"file:{tmp_path}")) as run:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        first = run.store_bytes
        loss = model(input_ids=ids, labels=ids).loss  # the old loss lived until here
        del loss
        gc.collect()
        _gradients(model, ids, num_steps=2)
        assert run.store_bytes == first > 0


def test_a_retained_graph_runs_backward_twice_and_a_freed_one_does_not():
    model, ids = _model(), _ids()
    with apply(model, _plan()):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        once = [one.grad.clone() for one in model.parameters()]
        loss.backward()
        twice = [one.grad / 2 for one in model.parameters()]
        assert _error(twice, once) < 1e-12
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_graphs_of_gradients_are_refused():
    model, ids = _model(), _ids()
    with apply(model, _plan()):
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)


def test_a_change_in_place_is_noticed():
    model, ids = _model(), _ids()
    states = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with apply(model, _plan(resident=frozenset(["input", "attention"]))):
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            states[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_exception_in_backward_leaves_the_model_as_it_was():
    model, ids = _model(), _ids()
    wanted = _gradients(model, ids)
    before = dict(model.named_parameters())

    def fail(_):
        raise KeyError("from a hook")

    with apply(model, _plan()):
        out = model(input_ids=ids).logits
        handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: fail(_))
        with pytest.raises(KeyError):
            out.sum().backward()
        handle.remove()
        assert all(before[name] is one for name, one in model.named_parameters())
        assert _error(_gradients(model, ids), wanted) < 1e-12


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
    model, ids = _model(), _ids()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = _Layer(layer, extra())
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    state = torch.get_rng_state()
    with (
        apply(model, _plan()),
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
        apply(model, _plan()),
        pytest.raises(ConfigError, match=r"TransformerEncoderLayer.*calls no"),
    ):
        layers[0](torch.randn(2, 5, 32))


def test_dropout_that_is_switched_on_later_is_refused():
    torch.manual_seed(0)
    config = CONFIGS["gpt2"]()
    config.resid_pdrop = 0.5
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = _ids()
    with apply(model, _plan()):
        model(input_ids=ids).logits.sum().backward()
        with pytest.raises(ConfigError, match=r"GPT2Block.*random numbers"):
            model.train()(input_ids=ids)


def test_experts_without_capacity_are_row_local():
    torch.manual_seed(0)
    config = MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).train()  # its products know no float64
    ids = _ids()
    wanted = [one.double() for one in _gradients(model, ids)]
    with apply(model, _plan()):
        assert _error(_gradients(model, ids), wanted) < 1e-5


def test_forwards_without_gradients_run_as_they_were():
    model, ids = _model(), _ids()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with apply(model, _plan()):
            assert torch.equal(model(input_ids=ids).logits, wanted)


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


def test_plans_are_written_and_read(tmp_path):
    plan = _plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
