"""Bytes of models, beside transformers' own modules without memory."""

import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.config import FAMILIES, ModelSpec, Quality, Workload
from shared.errors import ConfigError, DataError

TINY = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
GATED = {**TINY, "intermediate_size": 80, "num_key_value_heads": 2}
CASES = {
    "llama": GATED,
    "llama tied": {**GATED, "tie_word_embeddings": True},
    "llama biased": {**GATED, "attention_bias": True, "mlp_bias": True},
    "llama wide heads": {**GATED, "head_dim": 24},
    "mistral": GATED,
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 16},
    "qwen3 biased": {**GATED, "attention_bias": True},
    "opt": {**TINY, "ffn_dim": 128, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "opt projected": {**TINY, "ffn_dim": 96, "word_embed_proj_dim": 16},
    "opt post-norm": {**TINY, "ffn_dim": 96, "do_layer_norm_before": False},
    "bloom": {**TINY, "n_layer": 3, "n_head": 4},
}


def make(case):
    family = case.split()[0]
    settings = dict(CASES[case])
    if family == "bloom":
        del settings["num_hidden_layers"], settings["num_attention_heads"]
    return AutoConfig.for_model(family, **settings)


def layers_of(model):
    (layers,) = (
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == 3
    )
    return layers


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_model(case, tmp_path):
    config = make(case)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_hf(config)
    layers = layers_of(model)
    assert spec.num_layers == len(layers)
    of_layer = sum(p.numel() for p in layers[1].parameters())
    of_all = sum(p.numel() for p in model.parameters())
    assert spec.layer_bytes(16) == 2 * of_layer
    assert spec.embedding_bytes + spec.head_bytes == 2 * (of_all - 3 * of_layer)
    of_embedding = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "embed" in name or name.endswith("project_in.weight")
    )
    assert spec.embedding_bytes == 2 * of_embedding
    found = {
        name: (m.out_features, m.in_features, m.bias is not None)
        for name, m in layers[1].named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert {m.name: (m.out_features, m.in_features, m.has_bias) for m in spec.matrices} == found
    config.save_pretrained(tmp_path)
    assert ModelSpec.from_hf(tmp_path) == ModelSpec.from_hf(config.to_dict()) == spec
    assert {case.split()[0] for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", ["llama", "qwen3", "opt", "bloom"])
def test_keys_and_values_are_those_of_the_cache(case):
    config = make(case)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    with torch.no_grad():
        cache = model(torch.ones(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    held = cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes
    assert ModelSpec.from_hf(config).kv_bytes(2, 5) == held


def test_quantised_bytes_by_hand():
    spec = ModelSpec.from_hf(make("llama biased"))
    # q and o 32 x 32, k and v 16 x 32, gate and up 80 x 32, down 32 x 80.
    weights = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 80 * 32
    others = 2 * (32 + 16 + 16 + 32 + 80 + 80 + 32) + 2 * 2 * 32  # biases and norms
    assert spec.layer_bytes(4, None) == weights // 2 + others
    groups = 32 + 16 + 16 + 32 + 80 + 80 + 32 * 2  # of 64 columns: 80 take two
    assert spec.layer_bytes(4, 64) == weights // 2 + others + groups * 20 // 8
    assert spec.layer_bytes(16, 64) == 2 * weights + others
    assert spec.layer_bytes(3, None) == weights * 3 // 8 + others


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of fresh storages that are alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, num_bytes):
        self.now -= num_bytes


WIDE_MLP = {**GATED, "hidden_size": 64, "intermediate_size": 1024}
WIDE_ATTENTION = {**GATED, "head_dim": 128, "num_key_value_heads": 4, "intermediate_size": 48}


EVEN = {**GATED, "intermediate_size": 96}


@pytest.mark.parametrize("settings", [WIDE_MLP, WIDE_ATTENTION, EVEN])
def test_temporaries_are_those_that_a_layer_holds_at_once(settings):
    config = AutoConfig.for_model("llama", **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    spec, rows, tokens = ModelSpec.from_hf(config), 3, 256
    x = torch.randn(rows, tokens, spec.hidden_size, dtype=torch.bfloat16)
    positions = model.model.rotary_emb(x, torch.arange(tokens)[None])
    with torch.no_grad():
        model.model.layers[0](x, position_embeddings=positions)
        with LiveBytes() as counter:
            model.model.layers[0](x, position_embeddings=positions)
    assert counter.most == pytest.approx(spec.activation_bytes(rows, tokens), rel=0.15)


def test_shapes_have_fingerprints_of_their_own():
    assert len({ModelSpec.from_hf(make(case)).fingerprint for case in CASES}) == len(CASES)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_mixtures_of_experts_are_refused_by_name(family):
    with pytest.raises(ConfigError, match=rf"{family}.*mixtures of experts are not planned"):
        ModelSpec.from_hf(AutoConfig.for_model(family))


def test_what_is_no_model_is_refused(tmp_path):
    told = r"expected a model's folder with config\.json, got a folder without it; give"
    with pytest.raises(DataError, match=told):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: expected .* as JSON, got Expecting"):
        ModelSpec.from_hf(tmp_path)
    with pytest.raises(ConfigError, match=r"one of llama, mistral.*got 'gpt2'"):
        ModelSpec.from_hf(transformers.GPT2Config())
    with pytest.raises(ConfigError, match="expected the key 'hidden_size'"):
        ModelSpec.from_hf({"model_type": "llama"})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="expected a model's configuration, got a list"):
        ModelSpec.from_hf(tmp_path)


@pytest.mark.parametrize("key", ["num_prompts", "prompt_tokens", "new_tokens"])
def test_an_empty_workload_is_refused(key):
    sizes = {"num_prompts": 1, "prompt_tokens": 1, "new_tokens": 1, key: 0}
    with pytest.raises(ConfigError, match=f"{key}: expected at least 1, got 0"):
        Workload(**sizes)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_quality_is_a_number_of_nats(value):
    with pytest.raises(ConfigError, match="max_kl: expected nats a token"):
        Quality(max_kl=value)
    with pytest.raises(ConfigError, match="theta: expected 0 or more"):
        Quality(theta=value)
