"""Folders as strangers give them: stored, tied, stale and left-over weights, beside transformers."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.loader import (
    check_weights,
    count_own_head,
    digest_weights,
    load,
    load_stage,
    load_unrounded,
)
from llmpq.runtime.weights import files
from llmpq.runtime.weights.files import digest_file
from shared.errors import ConfigError, DataError

from ..tiny_models import FAMILIES, make

Q = "model.layers.1.self_attn.q_proj"
IDS = torch.arange(3, 15)[None]


def plan_of(bits=16):
    return Plan(
        stages=(Stage(rank=0, layers=(0, 5)),), bits=(bits,) * 5, group_size=16, prefill_size=1,
        decode_size=1,
    )  # fmt: skip


@pytest.fixture
def model(tmp_path):
    return make("llama", tmp_path / "model", tie_word_embeddings=False)


def change(folder, new=None, gone=(), **config):
    """Changes tensors and configuration of a folder."""
    path = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if name not in gone}
    save_file(tensors | (new or {}), path, metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def store(folder, form, settings, activations=None):
    """Stores all matrices as compressed-tensors does, and returns their weights."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**settings),
        input_activations=activations and QuantizationArgs(**activations),
    )  # fmt: skip
    compressor = BaseCompressor.get_value_from_registry(form)
    stored, weights = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            continue
        columns = settings.get("group_size") or weight.shape[1]
        most = weight.reshape(len(weight), -1, columns).abs().amax(-1)
        if settings["strategy"] == "tensor":
            most = most.max().reshape(1)
        scale = most / (448 if settings["type"] == "float" else (1 << settings["num_bits"] - 1) - 1)
        parts = {"weight": weight, "weight_scale": scale}
        if not settings["symmetric"]:
            parts["weight_zero_point"] = torch.ones_like(scale, dtype=torch.int8)
        parts = compressor.compress(parts, scheme)
        weights[name] = compressor.decompress(parts, scheme)["weight"]
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    change(
        folder, stored, weights,
        quantization_config={
            "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        },
    )  # fmt: skip
    return weights


INT, FP8 = {"type": "int", "symmetric": True}, {"type": "float", "num_bits": 8, "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMS = [
    ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}, TOKEN),
    ("naive-quantized", {**INT, "num_bits": 8, "strategy": "tensor", "symmetric": False}, None),
    ("float-quantized", {**FP8, "strategy": "tensor"}, None),
    ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 16}, None),
    ("pack-quantized", {**INT, "num_bits": 3, "strategy": "channel", "symmetric": False}, None),
]


@pytest.mark.parametrize(("form", "settings", "activations"), FORMS)
def test_a_stored_model_is_the_one_that_transformers_loads(
    model, caplog, form, settings, activations
):
    weights = store(model, form, settings, activations)
    ours = load_unrounded(model, "float32")
    for name, weight in weights.items():
        assert torch.equal(ours.get_parameter(name), weight), name
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    stage, _ = load_stage(model, plan_of(), 0)
    assert torch.equal(
        stage.layers[2].mlp.up_proj.weight, weights["model.layers.2.mlp.up_proj.weight"]
    )
    assert ("round activations too" in caplog.text) == (activations is not None)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "fp8", "torchao", "hqq", "mxfp4", "eetq", None]
)
def test_other_methods_are_refused_by_name(model, method):
    change(model, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ConfigError, match=rf"config\.json: expected plain weights.*by {method!r}"):
        check_weights(model)


DESCRIBED = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({**DESCRIBED, "format": "marlin-24"}, "got 'marlin-24'"),
        ({**DESCRIBED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "got sparsity_config"),
        ({**DESCRIBED, "transform_config": {"R1": {}}}, "got transform_config"),
        ({**DESCRIBED, "config_groups": [1]}, "expected a quantization_config of compressed-tensors"),
        ({"load_in_4bit": True}, r"by 'load_in_4bit'"),
        ([8], "expected a mapping in quantization_config"),
    ],
)  # fmt: skip
def test_descriptions_that_ask_for_more_are_refused(model, settings, told):
    with pytest.raises(ConfigError, match=told):
        check_weights(change(model, quantization_config=settings))


def test_a_description_inside_another_is_refused(model):
    inner = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ConfigError, match="quantization_config at the top, got one in text_config"):
        check_weights(change(model, text_config=inner))


LEFT_OVER = "expected the tensors of the model that config.json describes, got "
CODES = torch.zeros(48, 48, dtype=torch.int8)


@pytest.mark.parametrize(
    ("new", "gone", "told"),
    [
        ({f"{Q}.weight": CODES}, [], rf"model.safetensors: expected weights of fl.*{Q}.weight of type I8"),
        ({f"{Q}.weight": CODES.to(torch.float8_e4m3fn)}, [], "of type F8_E4M3"),
        ({f"{Q}.weight": CODES.to(torch.uint8)}, [], "of type U8"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int32)}, [], "model.norm.weight of type I32"),
        ({f"{Q}.weight_scale": torch.ones(48, 1)}, [], rf"{LEFT_OVER}{Q}.weight_scale"),
        ({f"{Q}.weight_scale_inv": torch.ones(1, 1)}, [], rf"{LEFT_OVER}{Q}.weight_scale_inv"),
        ({f"{Q}.SCB": torch.ones(48)}, [], rf"{LEFT_OVER}{Q}.SCB"),
        ({f"{Q}.weight.absmax": torch.ones(9)}, [], rf"{LEFT_OVER}{Q}.weight.absmax"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 48)}, [], rf"{LEFT_OVER}{Q}.lora_A.weight"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, [], "self_attn.k_scale"),
        ({f"{Q}.qweight": torch.zeros(6, 48, dtype=torch.int32)}, [f"{Q}.weight"], f"{Q}.qweight"),
        ({}, [f"{Q}.weight"], rf"expected the tensor {Q}.weight, but no file has it"),
        ({"model.embed_tokens.weight": torch.ones(140, 48)}, [], r"expected \[131, 48\].*got \[140, 48\]"),
    ],
)  # fmt: skip
def test_what_no_description_covers_is_refused_by_name(model, new, gone, told):
    with pytest.raises(DataError, match=told):
        check_weights(change(model, new, gone))


def test_left_overs_that_change_no_weight_pass(model):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
        "model.layers.0.self_attn.bias": torch.ones(1, 4, 4, dtype=torch.bool),
        "model.layers.0.self_attn.o_proj.bias": torch.zeros(48),
    }
    check_weights(change(model, extra))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different", "alone"])
def test_heads_are_those_that_transformers_takes(model, is_tied, head):
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    new = {"lm_head.weight": embedding.clone()} if head == "equal" else {}
    gone = {"absent": ["lm_head.weight"], "alone": ["model.embed_tokens.weight"]}.get(head, [])
    change(model, new, gone, tie_word_embeddings=is_tied)
    if gone and not is_tied:  # transformers makes random numbers up
        with pytest.raises(DataError, match=r"expected the tensor .*, but no file has it"):
            load(model, plan_of())
        return
    ours = load(model, plan_of())
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(ours, part)().weight, getattr(theirs, part)().weight), part
    stage, _ = load_stage(model, plan_of(), 0)
    assert torch.equal(stage.head.weight, theirs.get_output_embeddings().weight)
    is_own = is_tied and head == "different"
    assert count_own_head(model) == (embedding.numel() if is_own else 0)


def test_a_single_file_goes_before_an_index_and_an_index_names_files_alone(model, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        other.model.norm.weight.add_(1.0)
    other.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    for path in (tmp_path / "parts").glob("model*"):
        shutil.copy(path, model)
    norm = load_file(model / "model.safetensors")["model.norm.weight"]
    assert torch.equal(load_unrounded(model).model.norm.weight, norm)
    tree = json.loads(index.read_text())
    first, *_, last = sorted(set(tree["weight_map"].values()))
    swapped = {first: last, last: first}
    tree["weight_map"] = {name: swapped.get(at, at) for name, at in tree["weight_map"].items()}
    index.write_text(json.dumps(tree))
    assert torch.equal(load_unrounded(tmp_path / "parts").model.norm.weight, norm + 1)
    index.write_text("{}")
    with pytest.raises(DataError, match=r'index\.json: expected a "weight_map"'):
        load_unrounded(tmp_path / "parts")


def test_a_digest_tells_a_single_number_apart_and_no_names_of_files(model, tmp_path):
    plan, path = plan_of(), model / "model.safetensors"
    first = digest_weights(model, plan)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert digest_weights(tmp_path / "parts", plan) == first
    weight = load_file(path)[f"{Q}.weight"]
    weight[3, 3] += 1e-4
    change(model, {f"{Q}.weight": weight})
    assert digest_weights(model, plan) != first


@pytest.mark.parametrize("family", FAMILIES)
def test_names_tell_matrices_from_embeddings(family, tmp_path):
    model = load_unrounded(make(family, tmp_path / family))
    kinds = {name: type(module) for name, module in model.named_modules()}
    for name, kind in kinds.items():
        if issubclass(kind, (nn.Linear, nn.Embedding)):
            assert files.is_matrix(name) == issubclass(kind, nn.Linear), name


def test_a_digest_counts_every_block_and_their_order(tmp_path):
    path, block = tmp_path / "codes", 8 << 20
    data = torch.zeros(2 * block + 9, dtype=torch.uint8)
    data[block] = 1
    digests = []
    for changed in (None, 0, block - 1, block, 2 * block + 8):
        other = data.clone()
        if changed is not None:
            other[changed] = 2
        path.write_bytes(other.numpy().data)
        digests.append(digest_file(path))
    path.write_bytes(data[block:].numpy().tobytes() + data[:block].numpy().tobytes())
    digests.append(digest_file(path))
    assert len(set(digests)) == len(digests) == 6
