"""A small Mixture-of-Experts model and real text: what the demo and the benchmarks train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared.data.texts.bible import read_bible
from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["build_qwen3_moe", "load_text_batches"]

_VOCABULARY = 256  # a token is a byte


def build_qwen3_moe(
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_experts: int = 8,
    expert_width: int = 128,
    seed: int = 0,
) -> PreTrainedModel:
    """Builds a Qwen3-MoE over bytes with random weights, the same on every rank.

    Args:
        hidden_size: of the model, a multiple of 32.
        num_layers: of attention and experts.
        num_experts: of each layer; a token takes two.
        expert_width: rows of an expert's inner layer.
        seed: of the weights.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = {"head_dim": 32}  # which its signature does not name
    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        use_cache=False,
        output_router_logits=False,
        **sizes,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def load_text_batches(
    num_sequences: int, num_tokens: int, *, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Draws batches of the American Standard Version without end, a token a byte.

    Args:
        num_sequences: of a batch.
        num_tokens: of a sequence.
        seed: of the places that sequences are taken from; give each rank its own.

    Yields:
        "input_ids" and "labels", both [num_sequences, num_tokens].

    Raises:
        ConfigError: the text is missing or shorter than a sequence.
    """
    text = torch.frombuffer(bytearray(read_bible().encode()), dtype=torch.uint8)
    if not 0 < num_tokens <= len(text):
        raise ConfigError(
            f"num_tokens: expected 1 to {len(text):,}, the length of the text, got {num_tokens}; "
            f"lower it"
        )
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - num_tokens + 1, (num_sequences,), generator=generator)
        tokens = torch.stack([text[start : start + num_tokens] for start in starts.tolist()]).long()
        yield {"input_ids": tokens, "labels": tokens}
