"""Layers by tiles against plain autograd, in float64 and within twice plain float32's own error."""

import copy
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.runtime.run import apply
from memo.runtime.tiling.kept_attention import KeptAttention

from .tiled_models import CONFIGS, SIZES, STORED, error_of, gradients_of, make_tiny, tiles, tiny_ids

pytestmark = pytest.mark.unchecked  # layers are run by many tiles


@pytest.mark.parametrize(
    ("name", "tile_rows"),
    [
        *((name, 30) for name in CONFIGS),
        *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in CONFIGS if name != "llama"),
        ("llama", 1000),
        ("llama", 1),
        ("gpt2", 16),
    ],
)
def test_gradients_are_plain_autograds(name, tile_rows):
    model, ids = make_tiny(name), tiny_ids(tokens=37 if tile_rows > 1 else 9)
    wanted = gradients_of(model, ids)
    with apply(model, tiles(tile_rows)) as run:
        found = gradients_of(model, ids)
        assert run.num_restored == 2
    assert error_of(found, wanted) < 1e-12


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[] if one in ("llama", "gpt2") else [pytest.mark.slow])
        for one in CONFIGS
    ],
)
def test_float32_errs_at_most_twice_as_much_as_plain(name):
    exact, ids = make_tiny(name), tiny_ids(1, 120)
    wanted = gradients_of(exact, ids)
    model = copy.deepcopy(exact).float()
    plain = error_of(gradients_of(model, ids), wanted)
    with apply(model, tiles(16)):
        found = error_of(gradients_of(model, ids), wanted)
    assert 0 < found <= 2 * plain


@pytest.mark.parametrize(
    "kept",
    [
        {"resident": frozenset(["input"])},
        pytest.param({"resident": frozenset(["input", "attention"])}, marks=pytest.mark.slow),
        pytest.param({"stored": {"input": 1.0}}, marks=pytest.mark.slow),
        {"stored": {"input": 1.0}, "resident": frozenset(["attention"])},
        {"stored": STORED},
    ],
)
def test_whatever_is_kept_gradients_are_the_same(kept, tmp_path):
    model, ids = make_tiny(), tiny_ids()
    wanted = gradients_of(model, ids, num_steps=2)
    with apply(model, tiles(store=f"file:{tmp_path}", **kept)) as run:
        assert error_of(gradients_of(model, ids, num_steps=2), wanted) < 1e-12
        assert bool(run.store_bytes) == ("stored" in kept)


def test_tiles_have_so_many_rows_of_all_sequences_together():
    model, ids, seen = make_tiny(), tiny_ids(batch=2, tokens=37), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape[:2])))
    with apply(model, tiles(16)):
        gradients_of(model, ids)  # layers of this kind are proven row-local
        seen.clear()
        gradients_of(model, ids)
    assert seen == 4 * ([(2, 8)] * 4 + [(2, 5)]), "two layers forward, and backward"


def test_positions_of_each_sequence_are_cut_too():
    model, ids = make_tiny(), tiny_ids()
    positions = torch.stack([torch.arange(37), torch.arange(37) + 5])
    wanted = gradients_of(model, ids, position_ids=positions)
    with apply(model, tiles()):
        assert error_of(gradients_of(model, ids, position_ids=positions), wanted) < 1e-12


def test_kept_attention_lets_queries_keys_and_values_go_after_its_backward():
    def attention(query, key, value):
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    heads = tuple(torch.randn(1, 2, 16, 8) for _ in range(3))
    plan = LayerPlan(mode="tiles", tile_rows=8, resident=frozenset(["input", "attention"]))
    kept, answer = KeptAttention.run(heads, attention, plan, set())
    assert len(kept.backward(heads, torch.ones_like(answer))) == 3
    alive = [weakref.ref(one) for one in heads]
    del heads
    assert [one() for one in alive] == [None] * 3


def test_masks_reach_attention_whole():
    model, ids = make_tiny(), tiny_ids()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    wanted = gradients_of(model, ids, attention_mask=mask)
    with apply(model, tiles()):
        assert error_of(gradients_of(model, ids, attention_mask=mask), wanted) < 1e-12


def test_attention_that_returns_weights_is_computed_again():
    model, ids = make_tiny(attention="eager"), tiny_ids()
    wanted = gradients_of(model, ids)
    with apply(model, tiles()):
        assert error_of(gradients_of(model, ids), wanted) < 1e-12


def test_bfloat16_and_autocast():
    model, ids = make_tiny(dtype=torch.float32), tiny_ids(1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients_of(model, ids)
        with apply(model, tiles()):
            found = gradients_of(model, ids)
    assert error_of(found, [one.double() for one in wanted]) < 3e-2
    assert all(one.dtype == torch.float32 for one in found[1:])


def test_frozen_parameters_get_no_gradient():
    model, ids = make_tiny(), tiny_ids()
    for name, one in model.named_parameters():
        one.requires_grad_("q_proj" in name or "down_proj" in name)
    trained = [one for one in model.parameters() if one.requires_grad]

    def gradients():
        model.zero_grad()
        model(input_ids=ids).logits.pow(2).mean().backward()
        return [one.grad.clone() for one in trained]

    wanted = gradients()
    with apply(model, tiles()):
        assert error_of(gradients(), wanted) < 1e-12
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


def test_hooks_on_parameters_see_the_sum_once():
    model, ids = make_tiny(), tiny_ids()
    wanted = gradients_of(model, ids)
    seen = []
    with apply(model, tiles()):
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one: seen.append(one))
        assert error_of(gradients_of(model, ids), wanted) < 1e-12
    assert len(seen) == len(set(seen)) == len(list(model.parameters()))


def test_parameters_are_the_models_own_afterwards():
    model, ids = make_tiny(), tiny_ids()
    before = dict(model.named_parameters())
    with apply(model, tiles()):
        gradients_of(model, ids)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[one] is before[one] for one in before)


def test_experts_without_capacity_are_row_local():
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).train()  # its products know no float64
    ids = tiny_ids()
    wanted = [one.double() for one in gradients_of(model, ids)]
    with apply(model, tiles()):
        assert error_of(gradients_of(model, ids), wanted) < 1e-5


def test_forwards_without_gradients_run_as_they_were():
    model, ids = make_tiny(), tiny_ids()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with apply(model, tiles()):
            assert torch.equal(model(input_ids=ids).logits, wanted)


def test_plans_are_written_and_read(tmp_path):
    plan = tiles()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
