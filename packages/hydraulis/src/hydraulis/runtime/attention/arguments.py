"""Refuses attention that would be computed otherwise than a model asks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hydraulis.runtime.attention.packed import PackedDocuments
from shared.errors import ConfigError

__all__ = ["check_arguments"]

_NEEDLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "input_ids", "layer_idx", "logits_to_keep",
    "masked_tokens", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "seq_idx", "use_cache", "use_reentrant",
}  # fmt: skip
"""Arguments that change nothing of attention, or that say what the documents' lengths say too."""


def check_arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    packing: PackedDocuments,
    dropout: float,
    settings: dict[str, Any],
) -> None:
    """Refuses a call whose arguments are not all used.

    Args:
        module: that calls.
        query, key: of this rank's tokens.
        packing: the documents.
        dropout: of the attention weights.
        settings: all other arguments of the call.

    Raises:
        ConfigError: several rows, keys from before, a window shorter than a document, dropout, capped
            scores, attention to later tokens, or an argument that is not known here; names it.
    """
    longest = max(packing.lengths, default=0)
    window = settings.get("sliding_window")
    tokens = packing.ulysses_tokens()
    own = tokens[0 if packing.ulysses is None else packing.ulysses.rank]
    known = {*_NEEDLESS, "sliding_window", "softcap", "is_causal"}
    unknown = [name for name, value in settings.items() if value is not None and name not in known]
    problem = None
    if query.shape[0] != 1 or query.shape[2] != own:
        problem = f"one row of this rank's {own} tokens", f"{query.shape[0]} of {query.shape[2]}"
    elif key.shape[2] != query.shape[2]:
        problem = "no keys from before (use_cache=False)", f"{key.shape[2]} keys for {own} tokens"
    elif window is not None and window < longest:
        problem = (
            f"a sliding window of at least the longest document, {longest} tokens",
            f"{window}; cut documents to it, or train this model without packing",
        )
    elif dropout:
        problem = (
            "no dropout in attention",
            f"{dropout}; make the model with attention_dropout=0 (GPT-2: attn_pdrop=0)",
        )
    elif settings.get("softcap") is not None:
        problem = "scores that are not capped", f"softcap {settings['softcap']}"
    elif not getattr(module, "is_causal", True) or settings.get("is_causal") is False:
        problem = "causal attention", "attention to later tokens"
    elif unknown:
        problem = (
            "arguments that change nothing",
            f"{', '.join(sorted(unknown))}, which are not used here",
        )
    if problem is not None:
        raise ConfigError(
            f"attention by document in {type(module).__name__}: expected {problem[0]}, got {problem[1]}"
        )
