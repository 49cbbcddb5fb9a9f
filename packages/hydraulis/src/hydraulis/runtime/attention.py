"""Attention by document under transformers' own models, on one rank or over a group of them.

Packed documents never see each other. Nothing of a model is rewritten: its configuration names the
attention function that is registered here, as long as `attend` holds. The documents are an argument of
the model's call, which its layers pass on: a layer that is recomputed in the backward pass gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hydraulis.runtime.documents import attend_documents
from hydraulis.runtime.ring import attend_ring, chunks
from hydraulis.runtime.ulysses import check_heads, gather_tokens, repeat_keys, scatter_tokens
from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["PackedDocuments", "attend", "use_document_attention"]

_NAME = "hydraulis"


@dataclass(frozen=True, kw_only=True)
class PackedDocuments:
    """Documents of a micro-batch, and the ranks that they lie over.

    Each document is dealt to the ring's ranks in two chunks, see `attend_ring`; what a place in the
    ring holds, of all documents, is then cut evenly over the ranks of Ulysses.

    Attributes:
        lengths: tokens of the whole documents, in their packed order.
        ring: this rank's ring; None for one rank.
        ulysses: the ranks with which it exchanges heads for tokens; None for one rank.
    """

    lengths: tuple[int, ...]
    ring: Group | None = None
    ulysses: Group | None = None

    def tokens(self) -> Int64[Tensor, " local"]:
        """Which of the packed documents' tokens this rank holds, in the order in which it does."""
        rank, size = (0, 1) if self.ring is None else (self.ring.rank, self.ring.world_size)
        found, begin = [], 0
        for length in self.lengths:
            for low, high in chunks(length, rank, size):
                found.append(torch.arange(begin + low, begin + high))
            begin += length
        whole = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        if self.ulysses is None:
            return whole
        at = self.ulysses.rank
        first, last = (at * len(whole) // self.ulysses.world_size for at in (at, at + 1))
        return whole[first:last]

    def positions(self) -> Int64[Tensor, " all"]:
        """Places of all packed tokens in their documents, from 0."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def ulysses_tokens(self) -> list[int]:
        """Tokens of each rank of Ulysses, at this rank's place in the ring."""
        rank, size = (0, 1) if self.ring is None else (self.ring.rank, self.ring.world_size)
        whole = sum(
            high - low for length in self.lengths for low, high in chunks(length, rank, size)
        )
        parts = 1 if self.ulysses is None else self.ulysses.world_size
        return [(at + 1) * whole // parts - at * whole // parts for at in range(parts)]


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
    _register()
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def use_document_attention(model: nn.Module) -> None:
    """Lets a model's attention go by document whenever its input says where documents end.

    For loops that are not the engine's: the input is one row of packed documents beside `cu_seq_lens_q`,
    as transformers' `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes it. Other input is
    attended to as before. Activations may be recomputed.

    Args:
        model: a Hugging Face causal LM.
    """
    config: Any = model.config
    before = config._attn_implementation
    _register()

    def choose(
        _: nn.Module, args: Any, inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        ends = inputs.get("cu_seq_lens_q")
        config._attn_implementation = before if ends is None else _NAME
        # Every layer asks for the lengths: they wait for the device once.
        return None if ends is None else (args, {**inputs, "cu_seq_lens_q": ends.cpu()})

    def restore(module: Any, *_: Any) -> None:
        name = "is_activation_checkpointing"  # `is_gradient_checkpointing` before transformers 5.20
        recomputes = getattr(
            module, name if hasattr(module, name) else "is_gradient_checkpointing", False
        )
        # A backward pass that recomputes layers is still to come, which must find the same attention.
        if not (torch.is_grad_enabled() and recomputes):
            config._attn_implementation = before

    model.register_forward_pre_hook(choose, with_kwargs=True)
    model.register_forward_hook(restore, always_call=True)


def _register() -> None:
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Documents are told apart by their lengths."""


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
        packing = _from_ends(settings.get("cu_seq_lens_q"))
    _check(module, query, key, packing, dropout, settings)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0], key[0], value[0]
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        # Rotated queries and keys may be wide beside narrow values: torch's own attention narrows them.
        narrow = torch.get_autocast_dtype(device)
        q, k, v = (one.to(narrow) for one in (q, k, v))
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
    return out.transpose(0, 1)[None], None


def _from_ends(ends: Tensor | None) -> PackedDocuments:
    """Documents between the ends that a collator gives."""
    if ends is None:
        raise ConfigError(
            "attention by document: expected packing=PackedDocuments(...) or cu_seq_lens_q in the model's "
            "call, got neither"
        )
    return PackedDocuments(lengths=tuple(ends.diff().tolist()))


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    packing: PackedDocuments,
    dropout: float,
    settings: Any,
) -> None:
    """Refuses what would be computed otherwise than asked."""
    longest = max(packing.lengths, default=0)
    window = settings.get("sliding_window")
    tokens = packing.ulysses_tokens()
    own = tokens[0 if packing.ulysses is None else packing.ulysses.rank]
    told = None
    if query.shape[0] != 1 or query.shape[2] != own:
        told = f"one row of this rank's {own} tokens", f"{query.shape[0]} of {query.shape[2]}"
    elif key.shape[2] != query.shape[2]:
        told = "no keys from before (use_cache=False)", f"{key.shape[2]} keys for {own} tokens"
    elif window is not None and window < longest:
        told = f"a sliding window of at least the longest document, {longest} tokens", str(window)
    elif dropout:
        told = "no dropout in attention", str(dropout)
    elif settings.get("softcap") is not None:
        told = "scores that are not capped", f"softcap {settings['softcap']}"
    elif not getattr(module, "is_causal", True) or settings.get("is_causal") is False:
        told = "causal attention", "attention to later tokens"
    if told is not None:
        raise ConfigError(f"attention by document: expected {told[0]}, got {told[1]}")
