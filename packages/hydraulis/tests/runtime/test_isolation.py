"""Models of many families: packed documents get what each gets alone, or the model is refused by name."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hydraulis as hy
from hydraulis.integrations.rows import collate
from hydraulis.runtime.attention import check_isolation
from hydraulis.runtime.attention.arguments import check_arguments
from hydraulis.runtime.attention.packed import PackedDocuments
from shared.errors import ConfigError

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def rope(kind, **settings):
    return {**SMALL, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


EQUAL = {
    "llama": SMALL,
    "gpt2": {**GPT, "attn_pdrop": 0.0},
    "opt": {
        "vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    },
    "qwen2_moe": {
        **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "gemma3_text": {**SMALL, "head_dim": 8},
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
REFUSED = {
    "mamba": (MAMBA, r"got MambaForCausalLM \(.*MambaMixer.*\), where a packed document sees"),
    "rwkv": (
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
        "attention by document: .*RwkvForCausalLM",
    ),
    "bloom": ({**GPT, "hidden_size": 32}, "BloomForCausalLM .*where a packed document sees another"),
    "gpt_neo": (
        {
            "vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
        },
        "GPTNeoForCausalLM .*where a packed document sees another",
    ),
    "lfm2": ({**SMALL, "layer_types": ["conv", "full_attention"]}, r"\(.*Lfm2ShortConv.*\)"),
    "gpt_oss": (
        {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssAttention: expected arguments that change nothing, got s_aux",
    ),
    "gemma2": ({**SMALL, "head_dim": 8}, "Gemma2Attention: .* not capped, got softcap"),
    "stablelm": (SMALL, "StableLmAttention: .* layers pass them on"),
    "falcon": (
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "FalconForCausalLM does not take packed documents",
    ),
    "bert": ({**SMALL, "num_key_value_heads": None}, "causal attention, got attention to later"),
    "t5": ({"vocab_size": 97}, "expected a Hugging Face causal LM, got"),
}  # fmt: skip


def make_model(family, settings):
    torch.manual_seed(0)
    settings = {name: value for name, value in settings.items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * torch.randn(one.shape))
    return model


def make_batch(lengths=(9, 20, 5)):
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 97, (n,), generator=generator) for n in lengths]
    return texts, collate([{"input_ids": text, "labels": text} for text in texts])


@pytest.mark.parametrize("family", EQUAL)
def test_a_family_that_passes_computes_packed_documents_as_alone(family):
    model = make_model(family, EQUAL[family]).eval()
    alone, (texts, batch) = copy.deepcopy(model), make_batch()
    count = sum(len(text) - 1 for text in texts)
    for text in texts:
        loss = alone(input_ids=text[None], labels=text[None]).loss
        (loss * (len(text) - 1) / count).backward()
    hy.use_document_attention(model)
    model(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    for (name, one), other in pairs:
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_documents_see_each_other_is_refused(family):
    settings, told = REFUSED[family]
    if family == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        shape = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        model = T5ForConditionalGeneration(T5Config(**settings, **shape))
    else:
        model = make_model(family, settings)
    with pytest.raises(ConfigError, match=told):
        hy.use_document_attention(model)


@pytest.mark.parametrize(
    ("settings", "most", "reason"),
    [
        (rope("dynamic", factor=2.0), 64, "rope_type 'dynamic'"),
        (
            rope(
                "longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=2.0,
                original_max_position_embeddings=16,
            ),
            16, "rope_type 'longrope'",
        ),
        (rope("yarn", factor=2.0, original_max_position_embeddings=16), None, ""),
        (rope("linear", factor=2.0), None, ""),
    ],
)  # fmt: skip
def test_angles_of_the_longest_document_limit_lengths(settings, most, reason):
    limits = check_isolation(make_model("llama", settings))
    assert limits.max_tokens == most
    if most is not None:
        limits.check(most)
        with pytest.raises(ConfigError, match=f"at most {most} tokens, got {most + 1}: {reason}"):
            limits.check(most + 1)


def test_windows_limit_lengths():
    assert check_isolation(make_model("mistral", {**SMALL, "sliding_window": 16})).max_tokens == 16
    chunked = {
        **SMALL, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "attention_chunk_size": 16,
    }  # fmt: skip
    assert check_isolation(make_model("llama4_text", chunked)).max_tokens == 16


def test_a_loader_and_a_loop_refuse_documents_beyond_the_limit():
    model = make_model("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 16})
    engine = hy.Engine(model, lambda p: torch.optim.SGD(p, lr=0.1), max_tokens=64)
    hy.StepLoader([b"a" * 16], engine, tokens_per_step=64)
    with pytest.raises(ConfigError, match="at most 16 tokens, got 17: rope_type 'dynamic'"):
        hy.StepLoader([b"a" * 17], engine, tokens_per_step=64)
    with pytest.raises(ConfigError, match="at most 16 tokens, got 17"):
        engine.step([b"a" * 17])
    hy.use_document_attention(model)
    with pytest.raises(ConfigError, match="at most 16 tokens, got 20"):
        model(**make_batch()[1])


@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_a_model_that_computes_packed_documents_otherwise_is_refused(what):
    model = make_model("llama", SMALL)
    calls = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: calls.append("cu_seq_lens_q" in inputs), with_kwargs=True
    )

    def change(_module, _args, out):
        other = out + 1 if what == "outputs" else 2 * out - out.detach()
        return other if calls[-1] else out

    model.lm_head.register_forward_hook(change)
    with pytest.raises(ConfigError, match="what they get alone, got an error of"):
        check_isolation(model)


def test_dropout_in_attention_is_refused_before_training():
    model = make_model("llama", {**SMALL, "attention_dropout": 0.1})
    with pytest.raises(ConfigError, match=r"in attention, got 0\.1; make .* attention_dropout=0"):
        hy.use_document_attention(model)


def test_a_check_leaves_model_and_generators_as_they_were():
    model = make_model("llama", SMALL).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    generator, config = torch.get_rng_state(), model.config.to_dict()
    assert check_isolation(model).has_relative_positions
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.config.to_dict() == config
    assert all(one.grad is None for one in model.parameters())


def test_learned_positions_are_told_from_relative_ones():
    assert not check_isolation(make_model("gpt2", EQUAL["gpt2"])).has_relative_positions


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sixteen_bits_pass(family):
    check_isolation(make_model(family, EQUAL[family]).bfloat16())


def test_a_mask_inside_of_a_packed_document_is_refused():
    model = make_model("llama", SMALL)
    hy.use_document_attention(model)
    _, batch = make_batch()
    mask = torch.ones_like(batch["input_ids"])
    model(**batch, attention_mask=mask)
    mask[0, 3] = 0
    with pytest.raises(ConfigError, match="no pads inside of a packed document"):
        model(**batch, attention_mask=mask)
    with pytest.raises(ConfigError, match="one row of 34 tokens beside cu_seq_lens_q, got"):
        model(**batch, attention_mask=mask[:, 1:])


def test_arguments_that_are_not_known_are_named():
    q = torch.zeros(1, 4, 3, 8)
    packing = PackedDocuments(lengths=(1, 2))
    check_arguments(torch.nn.Identity(), q, q, packing, 0.0, {"position_ids": q, "sinks": None})
    with pytest.raises(ConfigError, match="got head_mask, sinks, which are not used here"):
        check_arguments(torch.nn.Identity(), q, q, packing, 0.0, {"sinks": q, "head_mask": q})
