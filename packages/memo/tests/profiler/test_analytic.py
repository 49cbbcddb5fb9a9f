"""Bytes of fake tensors against real ones, seconds against closed forms, other lengths against a count."""

import copy

import pytest
import torch
from llama_shape import LAYERS, SHAPE, VOCABULARY, F, H
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.profiler.analytic.analysis import LINKS, OPTIMIZERS, Analysis
from memo.profiler.analytic.fake_model import FakeModel
from memo.profiler.analytic.model_shapes import SHAPES, read_config
from memo.profiler.timing.layer_tiles import TILE_ROWS
from shared.errors import ConfigError, DataError
from shared.topology.device import PRESETS

pytestmark = pytest.mark.unchecked  # every operation of a step is counted


def llama(**changes):
    return LlamaConfig(**{**SHAPE, **changes})


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=1024)
    return Analysis(config, "A800").profile(1024, has_tiles=True).layers[0]


def saved_on_the_device(config, num_tokens, dtype):
    """Bytes of storages that one layer's forward saves, its input among them: run on real tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    layer = model.get_decoder().layers[0]
    found, known = {}, {one.untyped_storage().data_ptr() for one in model.parameters()}
    forward = layer.forward

    def run(hidden, *args, **kwargs):
        given = [*args, *kwargs.values(), *kwargs["position_embeddings"]]
        outside = known | {
            one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)
        }
        hidden = hidden.detach().requires_grad_()

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in outside:
                found[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            out = forward(hidden, *args, **kwargs)
        found.setdefault(
            hidden.untyped_storage().data_ptr(), (hidden.untyped_storage().nbytes(), hidden)
        )
        return out

    layer.forward = run
    model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    return sum(num_bytes for num_bytes, _ in found.values())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (LlamaConfig, "bfloat16"),
        (Qwen3Config, "float32"),
        pytest.param(LlamaConfig, "float32", marks=pytest.mark.slow),
        pytest.param(Qwen3Config, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_saved_bytes_are_those_of_a_real_layer(kind, dtype):
    config = kind(**{**SHAPE, "num_hidden_layers": 1, "vocab_size": 1000})
    real = saved_on_the_device(config, 512, getattr(torch, dtype))
    counted = FakeModel(config, getattr(torch, dtype)).count_layer(512, LayerPlan()).held_bytes
    # Eager torch keeps a few scalars and rows of positions beside what is counted here.
    assert counted == pytest.approx(real, rel=0.005)


def test_items_have_the_bytes_of_their_shapes(analysis):
    rows = 3000
    items = {one.name: one.num_bytes for one in analysis.profile(rows).layers[0].items}
    assert items[INPUT] == rows * H * 2
    assert items[ATTENTION] == rows * (H * 2 + SHAPE["num_attention_heads"] * 4), (
        "the result, and a float32 sum a head"
    )
    assert items["self_attn.q_proj.weight"] == rows * H * 2
    assert items["mlp.gate_proj.weight"] == items["mlp.up_proj.weight"] == rows * F * 2
    assert "mlp.down_proj.weight" not in items, "nothing needs it again"


def test_seconds_of_items_are_operations_over_a_share_of_the_peak(analysis):
    rows = 10_000
    seconds = {one.name: one.recompute_s for one in analysis.profile(rows).layers[0].items}
    peak = PRESETS["H100"].flops_per_s
    assert seconds["mlp.up_proj.weight"] == pytest.approx(2 * rows * H * F / (0.7 * peak))
    assert seconds[ATTENTION] == pytest.approx(2 * rows**2 * H / (0.73 * peak)), "causal: half"
    assert seconds[INPUT] == 0


def test_passes_take_at_least_their_products_and_twice_as_many_backward(analysis):
    rows = 8192
    layer = analysis.profile(rows).layers[0]
    peak = PRESETS["H100"].flops_per_s
    products = 2 * rows * (4 * H * H + 3 * H * F) / (0.7 * peak)
    attention = 2 * rows**2 * H / peak
    elementwise = layer.forward_s - products - attention / 0.73
    assert elementwise > 0
    assert elementwise == pytest.approx(layer.replay_s, rel=0.5)
    assert layer.backward_s > 2 * products + 2.5 * attention / 0.63


def test_operations_of_a_step_are_six_a_weight_and_token_and_causal_attention(analysis):
    rows, weights = 4096, LAYERS * (4 * H * H + 3 * H * F) + H * VOCABULARY
    wanted = 6 * rows * weights + 3 * LAYERS * 2 * rows**2 * H
    assert analysis.step_operations(rows) == pytest.approx(wanted)


def test_between_counted_lengths_bytes_are_never_too_few(analysis):
    model = FakeModel(llama(), torch.bfloat16)
    for rows in (1024, 16_384, 262_144):
        profile = analysis.profile(rows)
        plain = model.count_layer(rows, LayerPlan())
        assert plain.held_bytes <= profile.layers[0].saved_bytes <= plain.held_bytes + 1
        for said, plan in (
            (profile.layers[0].kept, LayerPlan()),
            (profile.layers[0].levels[0], LayerPlan(mode="restore", resident=frozenset([INPUT]))),
        ):
            counted = model.count_layer(rows, plan).passes
            assert counted.forward <= said.forward <= 1.02 * counted.forward + 1
            assert counted.backward <= said.backward <= 1.02 * counted.backward + (1 << 20)


def test_ranks_share_tokens_and_parameters_and_meet_all_keys(analysis):
    one, four = analysis, copy.copy(analysis)
    four.ranks = 4  # what a rank's tokens take is the same, and counted already
    whole, part = one.profile(65_536), four.profile(65_536)
    assert part.num_tokens == whole.num_tokens / 4
    seconds = [{item.name: item.recompute_s for item in p.layers[0].items} for p in (whole, part)]
    assert seconds[1][ATTENTION] == pytest.approx(seconds[0][ATTENTION] / 4)
    ring = 2 * 2 * H * 2 * part.num_tokens
    alone = one.profile(16_384).layers[0]
    assert part.layers[0].levels[-1].forward == alone.levels[-1].forward + ring
    assert part.layers[0].levels[-1].backward == alone.levels[-1].backward + 2 * ring
    layer, other = 4 * H * H + 3 * H * F + 2 * H, 2 * VOCABULARY * H + H
    assert one.num_parameters == LAYERS * layer + other
    assert whole.fixed_bytes == 16 * one.num_parameters, "2 and 2, and 12 of AdamW"
    # Whole at once: two layers and the gradients of one, and all that is outside of layers.
    assert part.fixed_bytes == 4 * one.num_parameters + 2 * (3 * layer + 2 * other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype", "wanted"),
    [
        ("sgd", "bfloat16", 12),
        ("adamw", "float32", 16),
        ("none", "bfloat16", 4),
        ("sgd", "float32", 12),
    ],
)
def test_optimizers_have_states(optimizer, dtype, wanted):
    analysis = Analysis(llama(), "H100", optimizer=optimizer, dtype=dtype)
    assert analysis.profile(512).fixed_bytes == wanted * analysis.num_parameters


def test_a_loss_in_blocks_takes_less_than_all_logits(analysis):
    profile = analysis.profile(65_536)
    logits = 65_536 * VOCABULARY * 4
    assert profile.head_bytes > logits
    assert profile.block_head_bytes < logits / 10


def test_gpt2_is_counted_too(gpt2):
    items = {one.name: one.num_bytes for one in gpt2.items}
    assert items["mlp.c_fc.weight"] == 1024 * 4 * 64 * 2


def test_every_device_has_a_link_and_every_shape_a_config():
    assert LINKS.keys() == PRESETS.keys()
    assert [read_config(name).hidden_size for name in SHAPES] == [4096, 4096, 2048]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "H9000"}, "device: expected one of H200, H100"),
        ({"optimizer": "lion"}, f"optimizer: expected one of {', '.join(OPTIMIZERS)}"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"ranks": 0}, "ranks: expected at least 1"),
    ],
)
def test_unknown_names_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        Analysis(llama(), **{"device": "H100", **changes})


def test_tokens_that_ranks_cannot_share_are_refused():
    with pytest.raises(
        ConfigError, match="a multiple of the 3 ranks, got 1000; ask for 999 or 1002"
    ):
        Analysis(llama(), "H100", ranks=3).profile(1000)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (None, DataError, "with config.json, or one of llama-7b"),
        ("{", DataError, "a model's configuration as JSON"),
        ("[]", DataError, "a model's configuration, got a list"),
        ('{"model_type": "unheard-of"}', ConfigError, "that transformers knows"),
        ('{"model_type": "llama", "hidden_size": "big"}', ConfigError, "hidden_size"),
        (
            '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}',
            ConfigError,
            "number of attention heads",
        ),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, text, kind, told):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(kind, match=told) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [pytest.param("vit", marks=pytest.mark.slow), "bert"])
def test_models_that_are_no_language_models_of_long_texts_are_refused_in_a_line(tmp_path, kind):
    """The second has positions for 512 tokens and no more."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}", "num_hidden_layers": 1}}')
    with pytest.raises(ConfigError, match="expected a causal language model") as caught:
        Analysis(read_config(tmp_path), "H100")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=64, use_sliding_window=True, max_window_layers=1, sliding_window=32,
        ),
        Qwen3MoeConfig(
            hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=64, num_experts=2, num_experts_per_tok=1,
            mlp_only_layers=[0],
        ),
    ],
)  # fmt: skip
def test_models_whose_layers_differ_are_refused_by_the_first_that_does(config):
    with pytest.raises(ConfigError, match="expected layers that are alike, got layer 1"):
        Analysis(config, "H100")


@pytest.mark.slow
def test_tiles_at_other_lengths_are_those_of_a_count(analysis):
    tile_rows, model = TILE_ROWS["cuda"], FakeModel(llama(), torch.bfloat16)
    for num_tiles, most in ((2, 1.01), (6, 1.3), (8, 1.01), (24, 1.1)):
        told = analysis.profile(num_tiles * tile_rows, has_tiles=True).layers[0].tiles
        counted = model.count_tiles_at(num_tiles * tile_rows, tile_rows)
        for mine, real in zip(told.levels, counted, strict=True):
            assert real.forward <= mine.forward <= most * real.forward
            assert real.backward <= mine.backward <= most * real.backward


@pytest.mark.slow
def test_backwards_by_tiles_take_a_second_forward_but_not_attention(analysis):
    layer = analysis.profile(1 << 16, has_tiles=True).layers[0]
    attention_s = next(one.recompute_s for one in layer.items if one.name == ATTENTION)
    again_s = layer.tiles.backward_s - layer.backward_s
    # Queries, keys and values are made twice, and rows are copied out of tensors and into them.
    assert 1 <= again_s / (layer.forward_s - attention_s) <= 2.5
    assert 1 <= layer.tiles.forward_s / layer.forward_s <= 1.25


def test_layers_that_draw_random_numbers_have_no_tiles(gpt2):
    assert gpt2.tiles is None
