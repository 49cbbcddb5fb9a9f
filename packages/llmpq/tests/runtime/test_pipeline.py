"""Tokens of pipelines, beside transformers' own generation and one process."""

import re
import shutil
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.loader import WeightFiles, load, load_stage, open_weights
from llmpq.runtime.messages import PREFILL, StageLinks
from llmpq.runtime.pipeline import Pipeline
from shared.comms import Group, RankPool
from shared.errors import ConfigError, DataError

from .tiny_models import FAMILIES, make

NUM_LAYERS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: make(family, folder / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def three():
    with RankPool(3) as pool:
        yield pool


def plan_for(cuts, ranks, bits=16, *, prefill_size=2, decode_size=4):
    bounds = [0, *cuts, NUM_LAYERS]
    stages = [
        Stage(rank=rank, layers=(low, high))
        for rank, (low, high) in zip(ranks, pairwise(bounds), strict=True)
    ]
    widths = (bits,) * NUM_LAYERS if isinstance(bits, int) else bits
    return Plan(
        stages=tuple(stages), bits=widths, group_size=16,
        prefill_size=prefill_size, decode_size=decode_size,
    )  # fmt: skip


def prompts(num_prompts=6, longest=9):
    """Ragged prompts, padded on the right."""
    torch.manual_seed(1)
    ids = torch.randint(3, 131, (num_prompts, longest))
    lengths = torch.randint(2, longest + 1, (num_prompts,))
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return ids * mask, mask


def generated(plan, folder, ids, mask, settings):
    with Pipeline(plan, folder) as pipe:
        return pipe.generate(ids, mask, **settings)


def by_transformers(model, ids, mask, num_new):
    """Greedy tokens of each prompt alone."""
    found = []
    for row, keep in zip(ids, mask.bool(), strict=True):
        whole = model.generate(
            row[keep][None], attention_mask=torch.ones(1, int(keep.sum()), dtype=torch.int64),
            max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False,
        )  # fmt: skip
        found.append(whole[0, int(keep.sum()) :])
    return torch.stack(found)


@pytest.mark.parametrize(
    "family", ["qwen2", "mistral", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_layers_with_a_sliding_window_keep_their_own(family, tmp_path, three):
    changed = {"sliding_window": 4}
    if family != "mistral":
        changed |= {"use_sliding_window": True, "max_window_layers": 2}
    folder, (ids, mask) = make(family, tmp_path, **changed), prompts()
    expected = by_transformers(AutoModelForCausalLM.from_pretrained(folder).eval(), ids, mask, 6)
    plan = plan_for([1], [2, 0])
    found = three.run(generated, plan, folder, ids, mask, {"max_new_tokens": 6}).results[0]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family, models, three):
    ids, mask = prompts()
    model = AutoModelForCausalLM.from_pretrained(models[family])
    expected = by_transformers(model, ids, mask, 7)
    assert len(expected.unique()) > 5
    for plan in (plan_for([2], [1, 0]), plan_for([1, 3], [0, 1, 2])):
        settings = {"max_new_tokens": 7, "eos_token_id": None}
        found = three.run(generated, plan, models[family], ids, mask, settings).results
        assert found[0].tolist() == expected.tolist()
        assert found[1:] == [None, None]


def test_angles_that_follow_the_longest_sequence_are_refused_by_name(tmp_path):
    folder = make(
        "llama",
        tmp_path,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(ConfigError, match="got rope_type 'dynamic'"):
        load(folder, plan_for([], [0]))


def longer_than_its_positions(folder):
    ids = torch.ones(1, 120, dtype=torch.int64)
    with Pipeline(plan_for([], [0]), folder) as pipe:
        with pytest.raises(ConfigError, match=r"at most 128 tokens.*120"):
            pipe.generate(ids, max_new_tokens=9)
        found = pipe.generate(ids, max_new_tokens=8)
    assert found is None or found.shape == (1, 8)


def test_more_tokens_than_learned_positions_are_refused(models, three):
    three.run(longer_than_its_positions, models["opt"])


def most_prefills_away(plan, folder, ids, mask):
    """Most prefills under way where the first stage never finds one back without waiting for it."""
    plain_send, plain_receive = StageLinks.send, StageLinks.receive
    away = [0]

    def send(links, message):
        away.append(away[-1] + (message.kind == PREFILL))
        plain_send(links, message)

    def receive(links, *, wait):
        found = plain_receive(links, wait=True) if wait else None
        away.append(away[-1] - (found is not None and found.kind == PREFILL))
        return found

    with mock.patch.multiple(StageLinks, send=send, receive=receive):
        generated(plan, folder, ids, mask, {"max_new_tokens": 2})
    return max(away) if Group.world().rank == plan.stages[0].rank else None


def test_prompts_that_wait_at_a_slow_stage_are_bounded(models, three):
    ids, mask = prompts(num_prompts=12)
    plan = plan_for([2], [0, 1], prefill_size=1)
    assert three.run(most_prefills_away, plan, models["llama"], ids, mask).results[0] == 4


def in_turns(plans, folder, ids, mask, settings):
    return [generated(plan, folder, ids, mask, settings) for plan in plans]


def test_pipelines_with_and_without_rank_0_follow_one_another(models, three):
    ids, mask = prompts()
    model = AutoModelForCausalLM.from_pretrained(models["llama"])
    expected = by_transformers(model, ids, mask, 3).tolist()
    plans = [plan_for([2], [1, 2]), plan_for([2], [0, 2]), plan_for([], [2]), plan_for([2], [2, 1])]
    found = three.run(in_turns, plans, models["llama"], ids, mask, {"max_new_tokens": 3}).results
    assert [tokens.tolist() for tokens in found[0]] == [expected] * 4


@pytest.mark.parametrize(
    "family",
    # Each family's layers as they are: the test of transformers' tokens. Packed weights know of no family.
    [
        pytest.param(one, marks=[] if one in ("llama", "qwen3") else pytest.mark.slow)
        for one in FAMILIES
    ],
)
def test_quantised_tokens_are_those_of_one_process(family, models, three):
    ids, mask = prompts()
    plan = plan_for([2, 3], [2, 0, 1], bits=(4, 3, 8, 16, 4))
    expected = by_transformers(load(models[family], plan), ids, mask, 7)
    settings = {"max_new_tokens": 7}
    found = three.run(generated, plan, models[family], ids, mask, settings).results
    assert found[0].tolist() == expected.tolist()


@pytest.mark.parametrize("limit", [12, 3])
def test_answers_end_as_in_transformers(limit, models, three):
    ids, mask = prompts()
    ids, mask = ids[:, -4:] * 0 + ids[:, :4], torch.ones_like(ids[:, :4])
    model = AutoModelForCausalLM.from_pretrained(models["llama"])
    free = by_transformers(model, ids, mask, 12)
    # Tokens of which every answer has one, at different places.
    ends = sorted({int(row[at]) for row, at in zip(free, (0, 2, 4, 1, 3, 5), strict=True)})
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=ends,
        pad_token_id=0,
    )[:, 4:]  # fmt: skip
    assert len({int((row == 0).sum()) for row in expected}) > 1, "some end before others"
    settings = {"max_new_tokens": limit, "eos_token_id": ends, "pad_token_id": 0}
    for plan in (plan_for([2], [1, 0], decode_size=6), plan_for([2], [0, 1], prefill_size=1)):
        found = three.run(generated, plan, models["llama"], ids, mask, settings).results[0]
        assert found.tolist() == expected.tolist()


def counted_seconds(plan, folder, ids, mask):
    with Pipeline(plan, folder) as pipe:
        empty = pipe.stage_s.total_s
        for _ in range(2):  # of the last call alone
            pipe.generate(ids, mask, max_new_tokens=4)
        found = pipe.stage_s
    parts = found.prefill, found.decode, found.head_prefill, found.head_decode
    return empty, [len(part) for part in parts], min(min(part, default=1.0) for part in parts)


def test_seconds_of_each_micro_batch_are_kept(models, three):
    ids, mask = prompts()
    plan = plan_for([2], [1, 0], prefill_size=2, decode_size=4)
    results = three.run(counted_seconds, plan, models["llama"], ids, mask).results
    # 6 prompts: prefills of 2, 2, 2; decodes of 4 and 2, three steps each behind the prefill.
    assert [counts for _, counts, _ in results] == [[3, 6, 0, 0], [3, 6, 3, 6], [0, 0, 0, 0]]
    assert all(empty == 0 and least > 0 for empty, _, least in results)


def read_bytes(plan, folder):
    with Pipeline(plan, folder) as pipe:
        return pipe.read_bytes


@pytest.mark.parametrize("bits", [4, 16])
def test_a_stage_reads_its_own_tensors_alone(bits, models, three):
    found = three.run(read_bytes, plan_for([2], [1, 0], bits), models["llama"]).results
    with safe_open(models["llama"] / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    late = sum(sizes[name] for name in sizes if re.search(r"layers\.[234]\.", name))
    assert found == [late, sum(sizes.values()) - late, 0]


def test_products_take_the_forms_of_their_stage_s_rank(models):
    tables = {"0": {"4": [[1, "dense32"]]}, "1": {"4": [[1, "packed"]]}}
    plan = replace(plan_for([2], [1, 0], 4), forms=tables)
    whole = [layer.mlp.up_proj.forms for layer in load(models["llama"], plan).model.layers]
    assert whole == [tables["1"]["4"]] * 2 + [tables["0"]["4"]] * 3
    for number, rank in enumerate(("1", "0")):
        stage, _ = load_stage(models["llama"], plan, number)
        assert [layer.mlp.up_proj.forms for layer in stage.layers] == [tables[rank]["4"]] * len(
            stage.layers
        )


def test_a_model_saved_without_its_head_is_read(models, tmp_path):
    AutoModel.from_pretrained(models["llama"]).save_pretrained(tmp_path)
    ids = prompts()[0]
    found, expected = (
        load(folder, plan_for([], [0]))(input_ids=ids).logits
        for folder in (tmp_path, models["llama"])
    )
    assert torch.equal(found, expected)


def test_a_matrix_is_let_go_before_the_next_one_is_read(models, monkeypatch):
    held, most = [], [0]

    def read(files, name):
        if name.endswith("proj.weight"):
            held.append(name)
            most[0] = max(most[0], len(held))
        return plain_read(files, name)

    def release(files):
        held.clear()
        plain_release(files)

    plain_read, plain_release = WeightFiles.read, WeightFiles.release
    monkeypatch.setattr(WeightFiles, "read", read)
    monkeypatch.setattr(WeightFiles, "release", release)
    load_stage(models["llama"], plan_for([2], [0, 1], 4), 1)
    assert most[0] == 1


def test_a_large_tensor_is_read_in_parts(tmp_path):
    expected = torch.randn(70_000, 48)
    save_file({"a": expected, "b": expected[:3].clone()}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as files:
        assert torch.equal(files.copy("a", torch.float32), expected)
        assert torch.equal(files.copy("b", torch.bfloat16), expected[:3].bfloat16())
        assert files.read_bytes == expected.nbytes + expected[:3].nbytes


@pytest.mark.parametrize("rows", [3, 70_000])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_broken_weights_are_named_at_any_width(rows, wrong, tmp_path):
    broken = torch.zeros(rows, 48)
    broken[-1, 5] = wrong
    save_file({"model.norm.weight": broken}, tmp_path / "model.safetensors")
    with (
        open_weights(tmp_path) as files,
        pytest.raises(DataError, match=r"model\.norm\.weight: expected finite weights"),
    ):
        files.copy("model.norm.weight", torch.float32)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_matrix_of_another_shape_than_configured_is_named(bits, models, tmp_path):
    folder = shutil.copytree(models["llama"], tmp_path / "model")
    name = "model.layers.2.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.2\.mlp\.down_proj.*expected .*48.* got .*47"):
        load(folder, plan_for([], [0], bits))
