"""Small models in float64, plans of tiles for them, and gradients of their logits' loss."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=16),
    "gpt2": lambda: GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=61,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
STORED = {"input": 1.0, "attention": 1.0}


def make_tiny(name="llama", dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def tiny_ids(batch=2, tokens=37):
    return torch.randint(0, 61, (batch, tokens), generator=torch.Generator().manual_seed(1))


def gradients_of(model, ids, num_steps=1, **inputs):
    model.zero_grad()
    for _ in range(num_steps):
        # The model's own loss rounds logits to float32.
        logits = model(input_ids=ids, **inputs).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def tiles(tile_rows=16, store="memory", **kept):
    layer = LayerPlan(mode="tiles", tile_rows=tile_rows, **(kept or {"stored": STORED}))
    return Plan(layers=(layer,), store=store)


def error_of(found, wanted):
    return max(
        ((one.double() - other).norm() / other.norm()).item()
        for one, other in zip(found, wanted, strict=True)
    )
