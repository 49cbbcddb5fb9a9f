"""What any layout exports is what transformers loads: the same weights, the same logits."""

import json
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hybridflow as hy
from hybridflow.models.config import PRESETS, DecoderConfig
from hybridflow.roles.state.export import export, hugging_face_config
from shared.errors import ConfigError, RankFailure

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder as transformers writes it, with a tokenizer's files."""
    path = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)).save_pretrained(
        path
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.txt").write_text("not a tokenizer's")
    return path


def tokens():
    return torch.randint(1, 48, (2, 9), generator=torch.Generator().manual_seed(1))


def rolled(actor):
    """The actor's own log-probabilities of some tokens, and those tokens."""
    batch = hy.Batch(
        tokens=tokens(),
        lengths=torch.tensor([9, 9]),
        mask=torch.arange(9).ge(1).expand(2, 9).contiguous(),
    )
    return actor.log_probs(batch).result()["log_probs"]


@pytest.mark.parametrize(
    ("layout", "is_sharded"), [("1-2-1", False), ("2-1-1", False), ("1-1-2", True)]
)
def test_any_layout_exports_what_it_was_given(pair, source, tmp_path, layout, is_sharded):
    settings = {"train": layout, "generate": "1-1", "is_sharded": is_sharded}
    actor = hy.Actor(str(source), pool=pair, **settings)
    path = export(actor, tmp_path / "new" / "model")
    found = load_file(path / "model.safetensors")
    wanted = load_file(source / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {file.name for file in path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    first, second = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, path))
    assert {**first, "_name_or_path": ""} == {**second, "_name_or_path": ""}


def test_a_trained_preset_has_the_same_log_probabilities_in_transformers(pair, tmp_path):
    adam = hy.AdamW(lr=1e-2)
    actor = hy.Actor("config:tiny-llama", pair, train="1-2-1", dtype="float64", optimizer=adam)
    prompts = hy.Batch(
        prompts=tokens(), prompt_lengths=torch.tensor([9, 9]), sample_ids=torch.arange(2)
    )
    batch = actor.generate(prompts, hy.Sampling(max_new_tokens=3)).result()
    batch["old_log_probs"] = batch["rollout_log_probs"].double()
    batch["advantages"] = batch["mask"].double()
    actor.update(batch)
    wanted = rolled(actor)
    path = export(actor, tmp_path / "model", max_file_bytes=60_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    model, told = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(told.values())
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float64
    logits = model(tokens()).logits[:, :-1].log_softmax(-1)
    found = logits.gather(-1, tokens()[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, wanted[:, 1:].double(), rtol=1e-5, atol=1e-5)


def test_a_scalar_head_is_a_sequence_classifier(pair, source, tmp_path):
    # A critic of a language model begins at zero; one step of fitting gives it other values.
    reward = hy.RewardModel(str(source), pair, train="2-1-1", optimizer=hy.AdamW(lr=1e-2))
    lengths = torch.tensor([9, 9])
    reward.fit(
        hy.Batch(
            chosen=tokens(), rejected=tokens().flip(0), chosen_lengths=lengths,
            rejected_lengths=lengths,
        )
    )  # fmt: skip
    wanted = reward.scores(hy.Batch(tokens=tokens(), lengths=lengths)).result()["scores"]
    assert wanted.abs().max() > 1e-3
    path = export(reward, tmp_path / "model")
    model, told = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not any(told.values())
    assert model.config.num_labels == 1
    torch.testing.assert_close(model(tokens()).logits[:, 0], wanted, rtol=1e-4, atol=1e-5)
    with hy.Workers.inline() as workers:
        again = hy.RewardModel(str(path), workers.pool(1))
        scores = again.scores(hy.Batch(tokens=tokens(), lengths=lengths)).result()["scores"]
        torch.testing.assert_close(scores, wanted)


def test_one_rank_exports_bfloat16(source, tmp_path):
    with hy.Workers.inline() as workers:
        actor = hy.Actor(str(source), workers.pool(1), dtype="bfloat16")
        path = export(actor, tmp_path / "model")
    found = load_file(path / "model.safetensors")
    wanted = load_file(source / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_nothing_is_overwritten_and_no_rank_is_left_waiting(pair, source, tmp_path):
    actor = hy.Actor(str(source), pair, train="1-2-1")
    with pytest.raises(ConfigError, match="expected an empty folder or none"):
        export(actor, source)
    with pytest.raises(ConfigError, match="max_file_bytes: expected at least 1, got 0"):
        export(actor, tmp_path / "model", max_file_bytes=0)
    # Where the first rank can not see the folder, the others are not left waiting.
    with pytest.raises(RankFailure, match=r"nowhere.*; free space there, or export elsewhere"):
        actor.export_weights(str(tmp_path / "nowhere"), 1 << 30).result()
    assert not list(tmp_path.iterdir())
    assert actor.num_updates().result() == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_that_did_not_come_from_json_is_rebuilt(name):
    config = DecoderConfig.parse(PRESETS[name])
    bare = DecoderConfig(
        **{name: getattr(config, name) for name in config.__slots__ if name != "raw"}
    )
    for made in (config, bare):
        tree = hugging_face_config(made, "vocabulary", torch.float32)
        assert DecoderConfig.parse(tree) == config
        assert tree["eos_token_id"] is None
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(tree))
        assert model.model.rotary_emb.inv_freq[1] > 0


@pytest.mark.slow
def test_four_ranks(source, tmp_path):
    wanted = load_file(source / "model.safetensors")
    with hy.Workers.local(4, timeout=timedelta(seconds=100)) as workers:
        pool = workers.pool(4)
        for layout, is_sharded in (("1-4-1", False), ("2-2-1", False), ("1-2-2", True)):
            actor = hy.Actor(str(source), pool, train=layout, generate="1-1", is_sharded=is_sharded)
            found = load_file(export(actor, tmp_path / layout) / "model.safetensors")
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), layout
