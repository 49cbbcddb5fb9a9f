"""The decoder against Hugging Face's: logits, gradients, folders, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hybridflow.models.config import PRESETS, DecoderConfig, inverse_frequencies, read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.pieces import folder_reader, initialize, load, pieces, weight_shapes
from hybridflow.models.rotary import rotate
from hybridflow.models.sequences import scores
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama, wide heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 6, "rms_norm_eps": 1e-2}),
    "llama, linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama, llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2, tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 6}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 4}),
}


def hugging_face(kind, dtype=torch.float64, **changed):
    """A model of a kind with values everywhere, biases and norms included."""
    config, model, more = KINDS[kind]
    torch.manual_seed(0)
    made = model(config(**{**SIZES, **more, **changed}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.to(dtype).eval()


def ours(source, dtype=torch.float64, head="vocabulary"):
    model = Decoder(read_config(source), head=head, dtype=dtype)
    state = source.state_dict()
    assert load(model, lambda name, box: whole(state[name], box) if name in state else None) == []
    return model


def whole(values, box):
    return values[box.within(Box((0,) * values.dim(), tuple(values.shape)))]


def logits(model, tokens):
    return model(tokens) @ model.head_weight.t()


def drawn(rows=3, width=40):
    return torch.randint(0, 24, (rows, width), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_hugging_faces(kind):
    peer = hugging_face(kind)
    with torch.no_grad():
        # Hugging Face has angles in float32 whatever the model's type.
        torch.testing.assert_close(
            logits(ours(peer), drawn()), peer(drawn()).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_hugging_faces(kind):
    peer = hugging_face(kind)
    model = ours(peer)
    slopes = torch.randn(3, 12, 24, dtype=torch.float64)
    (logits(model, drawn(3, 12)) * slopes).sum().backward()
    (peer(drawn(3, 12)).logits * slopes).sum().backward()
    wanted = {name: parameter.grad for name, parameter in peer.named_parameters()}
    held = pieces(model)
    assert sorted(piece.name for piece in held) == sorted(wanted)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    for piece in held:
        torch.testing.assert_close(
            piece.view(model), wanted[piece.name], rtol=1e-4, atol=1e-4, msg=piece.name
        )


@pytest.mark.parametrize("kind", ["llama, llama3", "qwen2", "qwen3", "mistral"])
def test_half_precision_is_as_near_as_hugging_faces(kind):
    half = hugging_face(kind)
    angles = half.model.rotary_emb.inv_freq
    half.to(torch.bfloat16).model.rotary_emb.inv_freq = angles  # kept in float32 when loaded so
    exact = copy.deepcopy(half).double()
    with torch.no_grad():
        wanted = exact(drawn()).logits
        error = (logits(ours(half, torch.bfloat16), drawn()) - wanted).abs()
        allowed = (half(drawn()).logits - wanted).abs()
    assert error.mean() <= 2 * allowed.mean()
    assert error.max() <= 2 * allowed.max()


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "qwen3"])
def test_a_folder_a_model_and_a_mapping_are_one_model(kind, tmp_path):
    peer = hugging_face(kind)
    peer.save_pretrained(tmp_path, max_shard_size="10kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    configs = [read_config(source) for source in (tmp_path, str(tmp_path), peer, peer.config)]
    configs += [read_config(peer.config.to_dict()), read_config(configs[0])]
    assert all(config == configs[0] for config in configs)
    model = Decoder(configs[0], dtype=torch.float64)
    assert load(model, folder_reader(tmp_path)) == []
    assert all(map(torch.equal, model.parameters(), ours(peer).parameters()))
    with torch.no_grad():
        torch.testing.assert_close(
            logits(model, drawn()), peer(drawn()).logits, rtol=1e-5, atol=1e-5
        )


def test_a_classifiers_folder_and_a_bare_decoders_are_read(tmp_path):
    more: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0}
    config = LlamaConfig(**SIZES, **more)
    torch.manual_seed(0)
    peer = LlamaForSequenceClassification(config).double().eval()
    peer.save_pretrained(tmp_path / "classifier")
    model = Decoder(read_config(tmp_path / "classifier"), head="scalar", dtype=torch.float64)
    assert load(model, folder_reader(tmp_path / "classifier")) == []
    tokens = drawn(3, 9) % 23 + 1
    lengths = torch.tensor([9, 4, 6])
    padded = torch.where(torch.arange(9) < lengths[:, None], tokens, 0)
    with torch.no_grad():
        found = scores(model, model(padded), lengths)
        wanted = peer(padded, attention_mask=(padded != 0).long()).logits[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    LlamaModel(config).save_pretrained(tmp_path / "bare")
    model = Decoder(read_config(tmp_path / "bare"), head="scalar")
    model.head.data.fill_(5)
    assert load(model, folder_reader(tmp_path / "bare")) == ["score.weight"]
    assert bool((model.head == 5).all())


def test_weights_of_another_shape_or_of_no_file_are_refused(tmp_path):
    hugging_face("llama").save_pretrained(tmp_path)
    wrong = Decoder(read_config({**SIZES, "model_type": "llama", "vocab_size": 25}))
    with pytest.raises(
        DataError, match=r"embed_tokens.weight: expected \[25, 16\], got \[24, 16\]"
    ):
        load(wrong, folder_reader(tmp_path))
    # Of a smaller model each box is there; only the whole shape tells.
    small = read_config({**SIZES, "model_type": "llama", "vocab_size": 20})
    with pytest.raises(DataError, match=r"is \[24, 16\], and by config.json \[20, 16\]"):
        load(Decoder(small), folder_reader(tmp_path, weight_shapes(small)))
    with pytest.raises(DataError, match=r"no \.safetensors file there"):
        folder_reader(tmp_path / "empty")


LLAMA = {**SIZES, "model_type": "llama"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is none of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None is none of"),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu'"),
        ({"mlp_bias": True}, "no mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp 1"),
        ({"attention_bias": True}, "attention_bias is not supported for llama"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of .* 3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaled by 'yarn' are not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaled by 'dynamic'"),
        ({"model_type": "mistral", "sliding_window": 32}, "a sliding window of 32 is not"),
        ({"model_type": "mistral"}, "expected sliding_window, got none; defaults for mistral vary"),
        ({"model_type": "qwen3"}, "expected head_dim, got none"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
            "set max_position_embeddings to at most that",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed, told):
    with pytest.raises(ConfigError, match=told):
        read_config({**LLAMA, **changed})


def test_windows_that_cut_nothing_off_are_taken():
    for changed in (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8},
    ):
        assert read_config({**LLAMA, **changed}).num_layers == 2


def test_sources_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no preset 'x'; there are tiny-llama, small-llama"):
        read_config("config:x")
    with pytest.raises(
        DataError, match=r"expected a model's folder with config\.json, .*, got a folder without it"
    ):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"expected config:NAME, a folder.*got a int"):
        read_config(3)
    assert set(PRESETS) == {"tiny-llama", "small-llama"}


@pytest.mark.parametrize(
    ("shard", "told"),
    [
        (
            (0, 1, 0, 3),
            "3 tensor shards do not divide 4 query heads, .* feed-forward rows; 1, 2, 4",
        ),
        ((0, 1, 0, 8), "8 tensor shards do not divide"),
        ((0, 3), "3 pipeline stages need a layer each, and there are 2"),
    ],
)
def test_shards_that_do_not_divide_a_model_are_refused_with_those_that_do(shard, told):
    with pytest.raises(ConfigError, match=told):
        Shard(read_config(LLAMA), *shard)
    with pytest.raises(ConfigError, match="a vocabulary of 26; pad it to 28"):
        Shard(read_config({**LLAMA, "vocab_size": 26}), 0, 1, 0, 4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("head", ["vocabulary", "scalar"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_first_weights_are_the_same_in_every_layout(family, head, is_tied):
    changed = {"model_type": family, "head_dim": 6, "tie_word_embeddings": is_tied}
    config = read_config({**LLAMA, **changed})
    one = Decoder(config, head=head)
    initialize(one, 5)
    wanted = {piece.name: piece.view(one) for piece in pieces(one)}
    assert {n: tuple(v.shape) for n, v in wanted.items()} == weight_shapes(config, head)
    for stages, shards in [(2, 1), (1, 4), (2, 2)]:
        seen = dict.fromkeys(wanted, 0)
        for pp in range(stages):
            for tp in range(shards):
                model = Decoder(config, Shard(config, pp, stages, tp, shards), head)
                initialize(model, 5)
                held = pieces(model)
                size = sum(parameter.numel() for parameter in model.parameters())
                assert sum(piece.box.numel for piece in held) == size
                for piece in held:
                    assert torch.equal(piece.view(model), whole(wanted[piece.name], piece.box))
                    seen[piece.name] += piece.box.numel
        assert all(seen[name] >= values.numel() for name, values in wanted.items())
    other = Decoder(config, head=head, dtype=torch.float64)
    initialize(other, 5)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.double(), b) for a, b in pairs)
    initialize(other, 6)
    assert not torch.equal(one.layers[0].down.double(), other.layers[0].down)
    assert wanted["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.3, rel=0.15)
    flat = [v.flatten()[:50] for n, v in wanted.items() if n.endswith("proj.weight")]
    assert all(not torch.equal(a, b) for k, a in enumerate(flat) for b in flat[:k])


def complex_rotation(values, angles):
    """A head's halves are real and imaginary parts, turned by exp(i angle)."""
    half = values.shape[-1] // 2
    turned = torch.complex(values[..., :half], values[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], -1)


@settings(max_examples=25)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    half=st.integers(1, 4),
    is_shared=st.booleans(),
)
def test_rotation_is_that_of_complex_numbers(batch, tokens, heads, half, is_shared):
    queries, keys = heads
    qkv = torch.randn(batch, tokens, queries + 2 * keys, 2 * half, dtype=torch.float64)
    angles = torch.randn(1 if is_shared else batch, tokens, 1, half, dtype=torch.float64) * 9
    found = rotate(qkv, angles.cos(), angles.sin(), queries, keys)
    q, k, v = qkv.split([queries, keys, keys], 2)
    wanted = complex_rotation(q, angles), complex_rotation(k, angles), v
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_rotations_gradient_is_its_slope_and_values_are_left_alone():
    qkv = torch.randn(2, 3, 4 + 2 * 2, 6, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(2, 3, 1, 3, dtype=torch.float64)
    turn = (angles.cos(), angles.sin(), 4, 2)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *turn), qkv)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *turn)[1], qkv)
    q, _, v = rotate(qkv, *turn)
    torch.testing.assert_close(q.norm(dim=-1), qkv[:, :, :4].norm(dim=-1))
    assert torch.equal(v, qkv[:, :, 6:])


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    rope = {**LLAMA3, "original_max_position_embeddings": 128}
    config = read_config({**LLAMA, "head_dim": 32, "rope_parameters": rope})
    plain = [500.0 ** (-k / 32) for k in range(0, 32, 2)]
    found = inverse_frequencies(config)
    assert found[1:4] == plain[1:4]
    assert found[0] == plain[0]
    assert found[-1] == pytest.approx(plain[-1] / 8)
    assert all(a / 8 <= b <= a for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_fills_up_on_the_right_changes_nothing_before_it(kind):
    model = ours(hugging_face(kind))
    tokens = drawn(2, 20)
    other = tokens.clone()
    other[0, 7:], other[1, 13:] = 0, 5
    found, changed = model(tokens), model(other)
    torch.testing.assert_close(found[0, :7], changed[0, :7], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1, :13], changed[1, :13], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0, :7], model(tokens[:1, :7])[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[0, 7], changed[0, 7])


def test_positions_may_be_given_and_too_many_are_refused():
    model = ours(hugging_face("llama"))
    tokens = drawn(2, 10)
    at = torch.arange(10).expand(2, 10)
    torch.testing.assert_close(model(tokens, positions=at), model(tokens))
    shifted = model(tokens, positions=at + 5)  # only distances count
    torch.testing.assert_close(shifted, model(tokens), rtol=1e-8, atol=1e-8)
    with pytest.raises(ConfigError, match="65 tokens, and the model has 64 positions"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_stages_one_after_another_are_the_model():
    peer = hugging_face("qwen2, tied")
    state, config = peer.state_dict(), read_config(peer)
    x = tokens = drawn(2, 9)
    for pp in range(2):
        stage = Decoder(config, Shard(config, pp, 2), dtype=torch.float64)
        assert load(stage, lambda name, box: whole(state[name], box)) == []
        x = stage(x)
    model = ours(peer)
    torch.testing.assert_close(x @ stage.head_weight.t(), logits(model, tokens))
    assert DecoderConfig.parse(peer.config.to_dict()) == config
