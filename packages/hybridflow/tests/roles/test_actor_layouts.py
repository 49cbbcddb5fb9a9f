"""A real Hugging Face Llama on many layouts does what it does on one rank, there and back."""

from datetime import timedelta

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybridflow as hy

# The heavier ones take eight ranks on two cores; named here, as they take longer than others do.
LAYOUTS = [
    ("1-2-1", "1-1", False),
    ("2-1-1", "1-1", False),
    ("1-1-2", "1-2", True),
    ("2-1-1", "2-1", False),
    pytest.param("1-1-2", "1-2", False, marks=pytest.mark.slow),
    pytest.param("1-2-2", "1-2", True, marks=pytest.mark.slow),
    pytest.param("2-1-2", "1-1", True, marks=pytest.mark.slow),
    pytest.param("2-2-1", "1-1", False, marks=pytest.mark.slow),
    pytest.param("1-4-2", "1-2", False, marks=pytest.mark.slow),
    pytest.param("2-2-2", "1-2", False, marks=pytest.mark.slow),
    pytest.param("1-2-2", "1-4", False, marks=pytest.mark.slow),
    pytest.param("1-4-1", "1-2", False, marks=pytest.mark.slow),
    pytest.param("2-2-1", "2-1", False, marks=pytest.mark.slow),
    pytest.param("2-2-1", "2-2", False, marks=pytest.mark.slow),
    pytest.param("4-1-1", "2-1", False, marks=pytest.mark.slow),
    pytest.param("4-1-1", "4-1", False, marks=pytest.mark.slow),
    pytest.param("1-1-2", "2-1", True, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with fewer key heads than shards, and one matrix for embedding and head."""
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def prompts():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 3, 7, 4, 6, 2])
    tokens = torch.randint(1, 48, (6, 7), generator=draw)
    tokens[torch.arange(7) >= lengths[:, None]] = 0
    return hy.Batch(prompts=tokens, prompt_lengths=lengths, sample_ids=torch.arange(6) + 100)


def trained(workers, folder, train=None, generate=None, is_sharded=False):
    """Generates, trains two steps, generates and trains again; what came out of it."""
    actor = hy.Actor(
        str(folder),
        workers.pool(workers.num_ranks),
        train=train,
        generate=generate,
        dtype="float64",
        optimizer=hy.AdamW(lr=3e-3, max_grad_norm=0.5),
        max_tokens=40,
        is_sharded=is_sharded,
    )
    greedy = hy.Sampling(max_new_tokens=6, temperature=0, num_samples=2)
    told = []
    for step in range(2):
        roll = actor.generate(prompts(), greedy, step=step)
        roll |= actor.log_probs(roll).select("log_probs", "entropy")
        batch = roll.result()
        batch["old_log_probs"] = batch["log_probs"] + 0.05
        draw = torch.Generator().manual_seed(step)
        batch["advantages"] = torch.randn(batch["tokens"].shape, generator=draw).double()
        told.append((batch, actor.update(batch, num_updates=2, entropy_coefficient=0.01)))
    return told


@pytest.fixture(scope="module")
def whole(folder):
    with hy.Workers.inline() as workers:
        return trained(workers, folder)


def test_one_rank_is_the_hugging_face_model(folder, whole):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    first = prompts()
    rows = zip(first["prompts"], first["prompt_lengths"].tolist(), strict=True)
    for k, (prompt, length) in enumerate(rows):
        asked = prompt[None, :length]
        found = model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=6, do_sample=False
        )
        batch = whole[0][0]
        for row in (2 * k, 2 * k + 1):
            assert batch["lengths"][row] == length + 6
            torch.testing.assert_close(batch["tokens"][row, : length + 6], found[0])


@pytest.mark.parametrize(("train", "generate", "is_sharded"), LAYOUTS)
def test_any_layout_is_the_one_rank_model(two, folder, whole, train, generate, is_sharded):
    ranks = hy.layout.Layout.parse(train).num_ranks
    if ranks == two.num_ranks:
        found = trained(two, folder, train, generate, is_sharded)
    else:
        with hy.Workers.local(ranks, timeout=timedelta(seconds=100)) as workers:
            found = trained(workers, folder, train, generate, is_sharded)
    for step, ((batch, told), (wanted, wanted_told)) in enumerate(zip(found, whole, strict=True)):
        assert torch.equal(batch["tokens"], wanted["tokens"]), step
        torch.testing.assert_close(batch["rollout_log_probs"], wanted["rollout_log_probs"])
        torch.testing.assert_close(batch["log_probs"], wanted["log_probs"], rtol=1e-9, atol=1e-9)
        assert told["loss"] == pytest.approx(wanted_told["loss"], rel=1e-9)
        assert told["grad_norm"] == pytest.approx(wanted_told["grad_norm"], rel=1e-9)
        assert told["entropy"] == pytest.approx(wanted_told["entropy"], rel=1e-9)
