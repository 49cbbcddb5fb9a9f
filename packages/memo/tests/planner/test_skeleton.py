import pytest
from transformers import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import memo
from shared.errors import ConfigError


def test_gpt_keeps_sixteen_times_its_width():
    for config in (GPT2Config(n_embd=768), GPT2Config(n_embd=768, n_inner=4 * 768)):
        found = memo.skeleton(config)
        assert sum(found.elements.values()) == 16 * 768
        assert found.elements["input"] == found.elements["attention"] == 768
        assert found.bytes_per_token() == 32 * 768
        assert found.bytes_per_token(itemsize=4) == 64 * 768
        # Without two norms and the activation.
        assert found.bytes_per_token(elementwise=False) == 2 * (16 - 1 - 1 - 4) * 768
    assert sum(memo.skeleton(GPT2Config(n_embd=64, n_inner=100)).elements.values()) == 8 * 64 + 200


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config])
def test_llama_1b_is_the_tables(config):
    found = memo.skeleton(
        config(
            hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8
        )
    )
    assert found.elements == {
        "input": 2048, "norm1": 2048, "q": 2048, "k": 512, "v": 512, "attention": 2048, "mid": 2048,
        "norm2": 2048, "gate": 8192, "up": 8192, "activation": 8192, "product": 8192,
    }  # fmt: skip
    assert found.bytes_per_token() == 92_160
    assert found.bytes_per_token(elementwise=False) == 51_200


def test_qwen3_has_heads_of_their_own_width_and_norms_of_queries_and_keys():
    found = memo.skeleton(
        Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128,
        )
    )  # fmt: skip
    assert found.elements["q"] == found.elements["attention"] == found.elements["norm_q"] == 2048
    assert found.elements["k"] == found.elements["v"] == found.elements["norm_k"] == 1024
    assert found.elements["input"] == 1024
    kept = 1024 * 2 + 2048 * 2 + 1024 * 2 + 3072 * 2
    assert found.bytes_per_token(itemsize=1, elementwise=False) == kept


def test_other_models_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected one of gpt2, llama.*got 'bert'"):
        memo.skeleton(BertConfig())
    with pytest.raises(
        ConfigError, match=r"a transformers configuration, got 'llama-7b'; give model\.config"
    ):
        memo.skeleton("llama-7b")


def test_elements_have_a_size():
    with pytest.raises(ConfigError, match="itemsize: expected"):
        memo.skeleton(GPT2Config()).bytes_per_token(itemsize=0)
