"""Attention by document under transformers' own models, on one rank or over a group of them.

Packed documents never see each other. Nothing of a model is rewritten: its configuration names the
attention function that is registered here, as long as `attend` holds. The documents are an argument of
the model's call, which its layers pass on: a layer that is recomputed in the backward pass gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hydraulis.runtime.attention.arguments import check_arguments
from hydraulis.runtime.attention.packed import PackedDocuments
from hydraulis.runtime.documents import attend_documents
from hydraulis.runtime.ring import attend_ring
from hydraulis.runtime.ulysses import check_heads, gather_tokens, repeat_keys, scatter_tokens
from shared.errors import ConfigError

__all__ = ["DOCUMENT_ATTENTION", "CallRecord", "attend", "record_calls", "register_attention"]

DOCUMENT_ATTENTION = "hydraulis"
"""Name of the attention function in a model's configuration."""


@dataclass
class CallRecord:
    """Calls of attention by document.

    Attributes:
        modules: that called it.
        windows: sliding windows that they asked for, in tokens.
        local_sizes: windows or chunks that masks were asked for, in tokens.
    """

    modules: list[nn.Module] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    local_sizes: list[int] = field(default_factory=list)


_record: ContextVar[CallRecord | None] = ContextVar("_record", default=None)


@contextmanager
def attend(model: nn.Module) -> Iterator[None]:
    """Lets a model's attention go by document; its input is one row of this rank's tokens.

    The model is called with `packing=PackedDocuments(...)` beside its input. Forward passes belong inside,
    and backward passes too where activations are recomputed.

    Args:
        model: a Hugging Face causal LM; what it computes is left as it was afterwards.

    Raises:
        ConfigError: while the model runs, what it asks of attention is not offered: a sliding window
            shorter than a document, capped scores, dropout, attention to later tokens, keys from
            before, or heads that Ulysses cannot deal.
    """
    config: Any = model.config
    before = config._attn_implementation
    register_attention()
    config._attn_implementation = DOCUMENT_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def record_calls() -> Iterator[CallRecord]:
    """Records the calls of attention by document, and what masks they asked for."""
    record = CallRecord()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def register_attention() -> None:
    """Makes attention by document known to transformers."""
    AttentionInterface.register(DOCUMENT_ATTENTION, _attention)
    AttentionMaskInterface.register(DOCUMENT_ATTENTION, _no_mask)


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Makes no mask: the documents' lengths say which tokens see each other."""
    record = _record.get()
    if record is not None and local_size is not None:
        record.local_sizes.append(local_size)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: PackedDocuments | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    if packing is None:
        packing = _from_ends(module, settings.get("cu_seq_lens_q"))
    record = _record.get()
    if record is not None:
        record.modules.append(module)
        record.windows += [w for w in (settings.get("sliding_window"),) if w is not None]
    check_arguments(module, query, key, packing, dropout, settings)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0], key[0], value[0]
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        # Rotated queries and keys may be wide beside narrow values: torch's own attention narrows them.
        narrow = torch.get_autocast_dtype(device)
        q, k, v = (one.to(narrow) for one in (q, k, v))
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # flash attention takes values as wide as keys
        v = nn.functional.pad(v, (0, q.shape[-1] - value_dim))
    ulysses, tokens = packing.ulysses, packing.ulysses_tokens()
    if ulysses is not None:
        check_heads(q.shape[0], k.shape[0], ulysses.world_size)
        k, v = (repeat_keys(one, ulysses.world_size) for one in (k, v))
        q, k, v = (gather_tokens(one, tokens, ulysses) for one in (q, k, v))
    if packing.ring is None:
        out = attend_documents(q, k, v, packing.lengths, scale)
    else:
        out = attend_ring(q, k, v, packing.lengths, scale, packing.ring)
    if ulysses is not None:
        out = scatter_tokens(out, tokens, ulysses)
    out = out[..., :value_dim]
    masked_tokens = settings.get("masked_tokens")
    if masked_tokens is not None:  # see nothing, as rows of a mask without a key
        out = out.masked_fill(masked_tokens[:, None], 0)
    return out.transpose(0, 1)[None], None


def _from_ends(module: nn.Module, ends: Tensor | None) -> PackedDocuments:
    """Documents between the ends that a collator gives."""
    if ends is None:
        raise ConfigError(
            f"attention by document in {type(module).__name__}: expected packing=PackedDocuments(...) or "
            f"cu_seq_lens_q of the model's call, got neither; give one, or train a model whose layers pass "
            f"them on"
        )
    return PackedDocuments(lengths=tuple(ends.diff().tolist()))
