"""Waves of prompts under a budget of keys and values."""

import logging

import pytest
import torch

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.rollout.native.generator import generate
from hybridflow.rollout.native.kv_cache import KVCache
from hybridflow.rollout.native.waves import cache_bytes, plan_waves
from hybridflow.rollout.sampling import Sampling
from shared.errors import ConfigError

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    made = Decoder(read_config("config:tiny-llama"), dtype=torch.float64).requires_grad_(False)
    pieces.initialize(made, 0)
    return made


def prompts_of(lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (length,), generator=draw) for length in lengths]


def test_the_figure_is_what_the_cache_allocates(model):
    assert cache_bytes(model, 3, 7, 5, 4) == KVCache(model, 3, 7, 5, 4).nbytes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_prompts", [1, 2, 4])
def test_responses_are_the_same_in_waves(model, temperature, num_prompts):
    prompts = prompts_of([3, 7, 1, 4, 2])
    sampling = Sampling(max_new_tokens=6, num_samples=3, temperature=temperature, end_token=5)
    done, ids = [], torch.arange(15) + 40
    whole = generate(model, prompts, sampling, sample_ids=ids)
    waves = generate(
        model, prompts, sampling, sample_ids=ids, on_token=done.append,
        cache_bytes=cache_bytes(model, num_prompts, 7, 3 * num_prompts, 5),
    )  # fmt: skip
    assert torch.equal(waves.tokens, whole.tokens)
    assert torch.equal(waves.lengths, whole.lengths)
    assert torch.equal(waves.prompt_lengths, whole.prompt_lengths)
    torch.testing.assert_close(waves.log_probs, whole.log_probs)
    assert done == sorted(done)
    assert done[-1] == 15


@pytest.mark.parametrize("budget_prompts", [1, 2, 3, 5, 9])
def test_waves_take_every_prompt_once_and_keep_the_budget(model, budget_prompts):
    sampling = Sampling(max_new_tokens=5, num_samples=4)
    budget = cache_bytes(model, budget_prompts, 8, 2, 4)
    waves = plan_waves(model, 9, 8, sampling, 256, budget)
    assert [k for wave in waves for k in range(9)[wave.prompts]] == list(range(9))
    for wave in waves:
        assert wave.num_places >= 1
        assert cache_bytes(model, len(range(9)[wave.prompts]), 8, wave.num_places, 4) <= budget


def test_what_does_not_fit_is_refused_with_its_figure(model):
    least = cache_bytes(model, 1, 8, 1, 4)
    sampling = Sampling(max_new_tokens=5)
    assert len(plan_waves(model, 3, 8, sampling, 256, least)) == 3
    with pytest.raises(ConfigError, match=f"take {least:,} bytes .* budget is {least - 1:,}"):
        plan_waves(model, 3, 8, sampling, 256, least - 1)


def test_a_large_model_says_what_its_waves_take(caplog):
    """512 prompts of 8k tokens on four ranks of tensor parallelism."""
    config = read_config(LLAMA_70B)
    model = Decoder(config, Shard(config, 0, 1, 0, 4), device="meta", dtype=torch.bfloat16)
    sampling = Sampling(max_new_tokens=1024, num_samples=8)
    with caplog.at_level(logging.INFO):
        waves = plan_waves(model, 512, 8192, sampling, 256, 40 * 10**9)
    a_token = 2 * 80 * 2 * 128 * 2
    most = cache_bytes(model, 512, 8192, 256, 1023)
    assert most == a_token * (512 * 8192 + 256 * 1023)
    assert f"{most / 1e9:.2f} GB" in caplog.text
    assert f"in {len(waves)} waves" in caplog.text
    size = len(range(512)[waves[0].prompts])
    assert a_token * (size * 8192 + waves[0].num_places * 1023) <= 40 * 10**9
