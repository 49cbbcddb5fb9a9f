"""Exports beside the engines that read them: transformers' logits, accelerate's placement."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate import infer_auto_device_map
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.integrations import EXPORTS, export
from llmpq.integrations.compressed_tensors import round_around_zero
from llmpq.integrations.device_map import device_map
from llmpq.integrations.llama_cpp import tensor_split, tensor_types
from llmpq.integrations.vllm import partition
from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.linear import QuantLinear
from llmpq.runtime.loader import load, load_unrounded
from shared.errors import ConfigError
from shared.kernels import weight_matmul

FAMILIES = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 96, "num_key_value_heads": 2},
    "qwen2": {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {},
}
IDS = torch.arange(20).view(2, 10) % 64


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    torch.manual_seed(0)
    names = {"num_hidden_layers": 4, "num_attention_heads": 4}
    if request.param == "bloom":
        names = {"n_layer": 4, "n_head": 4}
    config = AutoConfig.for_model(
        request.param, vocab_size=64, hidden_size=32, **names, **FAMILIES[request.param]
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def make_plan(bits=(3, 16, 4, 8), **settings):
    stages = (Stage(rank=1, layers=(0, 3)), Stage(rank=0, layers=(3, 4)))
    return Plan(
        stages=stages,
        bits=bits,
        group_size=settings.pop("group_size", 16),
        prefill_size=1,
        decode_size=1,
        **settings,
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("bits", [(3, 16, 4, 8), (3, 3, 16, 3)])
def test_transformers_loads_the_folder_with_our_logits(folder, tmp_path, bits):
    plan = make_plan(bits)
    lines = export(plan, "compressed-tensors", folder, tmp_path / "out")
    assert str(tmp_path / "out") in lines[0]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = load(folder, plan)
    assert not any("bfloat16" in line for line in lines)
    torch.testing.assert_close(logits(loaded), logits(ours), rtol=2e-5, atol=2e-5)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.allclose(logits(loaded), logits(whole), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_scales_that_bfloat16_rounds_are_told(folder, tmp_path):
    plan = replace(make_plan((4,) * 4), dtype="bfloat16")
    lines = export(plan, "compressed-tensors", folder, tmp_path / "out")
    assert any("scales are rounded to bfloat16" in line for line in lines)


@pytest.mark.parametrize("engine", ["compressed-tensors", "vllm"])
def test_no_folder_with_files_is_replaced(folder, tmp_path, engine):
    (tmp_path / "mine.txt").write_text("kept")
    weights = {path: path.read_bytes() for path in folder.iterdir()}
    for out in (tmp_path, folder, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match="expected a new or empty folder to write to"):
            export(make_plan((4, 8, 4, 8), group_size=32), engine, folder, out)
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert {path: path.read_bytes() for path in folder.iterdir()} == weights


def test_an_unquantised_plan_is_the_model(folder, tmp_path):
    export(make_plan((16,) * 4), "compressed-tensors", folder, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(whole))


def test_every_module_has_a_device(folder, tmp_path):
    export(make_plan(), "device-map", folder, tmp_path / "map.json")
    devices = json.loads((tmp_path / "map.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert devices == device_map(make_plan(), model)
    # accelerate's own map of everything on one device, at the same granularity.
    prefixes = tuple(f"{name}." for name in devices)
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert name.startswith(prefixes), name
    layers = {name: rank for name, rank in devices.items() if re.search(r"\.\d+$", name)}
    assert list(layers.values()) == [1, 1, 1, 0]
    assert {rank for name, rank in devices.items() if name not in layers} == {1}
    assert infer_auto_device_map(model, {"cpu": "1GB"}) == {"": "cpu"}


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_vllm_gets_stages_and_forms_that_its_kernels_take(folder, tmp_path, group_size):
    plan = make_plan(group_size=group_size)
    assert partition(plan) == "3,1"
    lines = export(plan, "vllm", folder, tmp_path / "an out")
    assert any(f"VLLM_PP_LAYER_PARTITION=3,1 vllm serve '{tmp_path}/an out'" in x for x in lines)
    assert any("--pipeline-parallel-size 2" in line for line in lines)
    assert any("64 rows and 128 columns" in line for line in lines)
    config = json.loads((tmp_path / "an out" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"]
    # Marlin has 4 bits with zero points, and 8 bits without.
    assert {g["weights"]["num_bits"]: g["weights"]["symmetric"] for g in groups.values()} == {
        4: False,
        8: True,
    }
    assert {g["weights"]["strategy"] for g in groups.values()} == {
        "channel" if group_size == -1 else "group"
    }
    # 4-bit groups hold the layers of 3 and 4 bits.
    targets = groups["group_4"]["targets"]
    assert {re.findall(r"layers\.(\d)", name)[0] for name in targets} == {"0", "2"}
    tensors = load_file(tmp_path / "an out" / "model.safetensors")
    written = load_unrounded(tmp_path / "an out", "float32")
    for name, module in load(folder, plan).named_modules():
        if isinstance(module, QuantLinear):
            assert (f"{name}.weight_zero_point" in tensors) == (module.bits < 8)
            ours, theirs = weight_matmul.unpack(module.packed), written.get_submodule(name).weight
            if module.bits < 8:
                assert torch.equal(theirs, ours)
            else:  # at most half of the larger step more
                step = tensors[f"{name}.weight_scale"].repeat_interleave(
                    ours.shape[1] // tensors[f"{name}.weight_scale"].shape[1], 1
                )
                assert ((theirs - ours).abs() <= 0.501 * step).all()


def test_codes_that_fit_without_zero_points_are_kept():
    scale, zero = torch.full((1, 2), 0.5), torch.tensor([[128, 10]], dtype=torch.uint8)
    codes = torch.tensor([[1, 255, 128, 200, 0, 10, 255, 20]], dtype=torch.uint8)
    packed = weight_matmul.from_codes(codes, scale, zero, 8, group_size=4)
    signed, scales = round_around_zero(packed, 8)
    assert signed[0, :4].tolist() == [-127, 127, 0, 72], "exact where steps fit"
    assert scales[0].tolist() == pytest.approx([0.5, 0.5 * 245 / 127])
    assert signed[0, 4:].tolist() == [-5, 0, 127, 5]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_vllm_refuses_groups_that_its_kernels_lack(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"groups of 32, 64 or 128 columns.*got 16; plan with"):
        export(make_plan(), "vllm", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(make_plan(group_size=10**9), "vllm", folder, tmp_path / "row")
    config = json.loads((tmp_path / "row" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_8"]["weights"]["strategy"] == "channel"


@pytest.mark.parametrize("folder", ["qwen2"], indirect=True)
def test_an_exported_folder_is_planned_and_exported_again(folder, tmp_path):
    plan = make_plan((4, 8, 3, 16))
    export(plan, "compressed-tensors", folder, tmp_path / "once")
    unrounded = make_plan((16,) * 4)
    again = load(tmp_path / "once", unrounded)
    torch.testing.assert_close(logits(again), logits(load(folder, plan)), rtol=2e-5, atol=2e-5)
    (tmp_path / "once" / "quantize_config.json").write_text("{}")
    export(unrounded, "compressed-tensors", tmp_path / "once", tmp_path / "twice")
    config = json.loads((tmp_path / "twice" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "twice" / "quantize_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "twice", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(again))


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_llama_cpp_gets_types_and_split(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "my model")
    export(make_plan(), "llama.cpp", tmp_path / "my model", tmp_path / "commands.sh")
    text = (tmp_path / "commands.sh").read_text()
    assert "--tensor-split 3,2" in text
    assert "--gpu-layers 5" in text
    assert f"convert_hf_to_gguf.py '{tmp_path}/my model' " in text
    assert "--token-embedding-type bf16 --output-tensor-type bf16" in text
    kinds = {}
    for pattern, kind in tensor_types(make_plan()):
        for layer in range(4):
            for tensor in ("attn_q", "ffn_down", "attn_output"):
                if re.search(pattern, f"blk.{layer}.{tensor}.weight"):
                    kinds.setdefault(layer, set()).add(kind)
        assert not re.search(pattern, "blk.10.attn_q.weight")
    assert kinds == {0: {"q3_K"}, 1: {"bf16"}, 2: {"q4_K"}, 3: {"q8_0"}}


@pytest.mark.parametrize("counts", [(8, 22), (1, 1, 1), (13, 5, 12), (30,), (41, 38, 47)])
def test_llama_cpp_puts_each_layer_where_the_plan_does(counts):
    ends = torch.tensor(counts).cumsum(0).tolist()
    stages = tuple(
        Stage(rank=rank, layers=(end - count, end))
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
    )
    plan = Plan(stages=stages, bits=(4,) * ends[-1], prefill_size=1, decode_size=1)
    # Its rule: the first device whose share of the sum, as float32, exceeds layer / (layers + 1).
    shares = torch.tensor([float(part) for part in tensor_split(plan).split(",")])
    bounds = shares.cumsum(0) / shares.sum()
    for stage in stages:
        for layer in range(*stage.layers):
            place = torch.tensor(float(layer)) / (ends[-1] + 1)
            assert int(torch.searchsorted(bounds, place, right=True)) == stage.rank


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_what_cannot_be_exported_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"export: expected one of compressed-tensors, .*'onnx'"):
        export(make_plan(), "onnx", folder, tmp_path / "out")
    uneven = Plan(
        stages=make_plan().stages, bits=(4,) * 4, group_size=20, prefill_size=1, decode_size=1
    )
    with pytest.raises(ConfigError, match=r"a divisor of 32 \(columns of self_attn\.q_proj\)"):
        export(uneven, "compressed-tensors", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    short = Plan(
        stages=(Stage(rank=0, layers=(0, 2)),), bits=(4,) * 2, prefill_size=1, decode_size=1
    )
    for target in ("compressed-tensors", "vllm", "device-map"):
        with pytest.raises(ConfigError):
            export(short, target, folder, tmp_path / "out")
    assert set(EXPORTS) == {"compressed-tensors", "vllm", "llama.cpp", "device-map"}
