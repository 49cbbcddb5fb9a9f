"""A decoder of the Llama family, or one rank's part of it.

One rank holds a stage of the layers and a shard of each: attention heads, rows of the feed-forward
net and of the vocabulary. Key and value heads are replicated if there are fewer than shards.
Queries, keys and values are one fused product, gate and up another, because small products are
bound by memory; `hybridflow.models.pieces` maps them to Hugging Face's weights. Sequences are
left-aligned and padded on the right, so that causal attention needs no further mask: no real token
attends to padding.

Shapes: B sequences, T tokens, D hidden, H query heads and K key heads of this shard, E a head's size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridflow.models.config import DecoderConfig, inverse_frequencies
from hybridflow.models.parallel import stage_layers
from hybridflow.models.rotary import rotate
from shared.comms.group import Group
from shared.comms.tensor_parallel import copy_to, sum_from
from shared.errors import ConfigError

__all__ = ["Attend", "Decoder", "Layer", "Shard", "attend_causally", "see_causally"]

Attend = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]
"""Attention: function of a layer, its queries, keys and values [B, T, H + 2 K, E] before rotation,
and cosine and sine of the tokens' angles [B or 1, T, 1, E / 2]; returns [B, T, H, E]."""


class Shard:
    """The part of a model that a rank holds.

    Attributes:
        pp, num_stages: index of the stage, and number of stages.
        tp, num_shards: index of the shard, and number of shards.
        group: the ranks of the stage's other shards; None when there is one shard.
        layers: indices of the stage's layers.
        num_heads, num_kv_heads: heads of this shard.
        first_kv_head: index of its first key head in the whole model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pp: int = 0,
        num_stages: int = 1,
        tp: int = 0,
        num_shards: int = 1,
        group: Group | None = None,
    ) -> None:
        """Computes a rank's part of a model.

        Raises:
            ConfigError: if shards do not divide heads, feed-forward rows or vocabulary, or there
                are more stages than layers.
        """
        self.pp, self.num_stages, self.tp, self.num_shards = pp, num_stages, tp, num_shards
        self.group = group
        heads, kv_heads, t = config.num_heads, config.num_kv_heads, num_shards
        if heads % t or (kv_heads % t and t % kv_heads) or config.ffn_size % t:
            fits = [
                k
                for k in range(1, heads + 1)
                if heads % k == 0
                and not (kv_heads % k and k % kv_heads)
                and not config.ffn_size % k
            ]
            raise ConfigError(
                f"{t} tensor shards do not divide {heads} query heads, {kv_heads} key heads and "
                f"{config.ffn_size} feed-forward rows; {', '.join(map(str, fits))} do"
            )
        if config.vocab_size % t:
            raise ConfigError(
                f"{t} tensor shards do not divide a vocabulary of {config.vocab_size}; pad it "
                f"to {-(-config.vocab_size // t) * t} with resize_token_embeddings"
            )
        if num_stages > config.num_layers:
            raise ConfigError(
                f"{num_stages} pipeline stages need a layer each, and there are {config.num_layers}"
            )
        self.layers = stage_layers(config.num_layers, num_stages, pp)
        self.num_heads, self.num_kv_heads = heads // t, max(1, kv_heads // t)
        self.first_kv_head = tp * kv_heads // t

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, whose input is tokens."""
        return self.pp == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the head."""
        return self.pp == self.num_stages - 1


class Layer(nn.Module):
    """Attention and feed-forward net, each with a pre-norm and a residual connection."""

    def __init__(self, config: DecoderConfig, shard: Shard, index: int, **kind) -> None:
        super().__init__()
        self.index, self.eps, self.group = index, config.norm_eps, shard.group
        self.num_heads, self.num_kv_heads = shard.num_heads, shard.num_kv_heads
        width, head, ffn = config.hidden_size, config.head_dim, config.ffn_size // shard.num_shards
        rows = (self.num_heads + 2 * self.num_kv_heads) * head
        empty = partial(torch.empty, **kind)
        self.input_norm = nn.Parameter(empty(width))
        self.qkv = nn.Parameter(empty(rows, width))
        self.qkv_bias = nn.Parameter(empty(rows)) if config.has_qkv_bias else None
        self.q_norm = nn.Parameter(empty(head)) if config.has_qk_norm else None
        self.k_norm = nn.Parameter(empty(head)) if config.has_qk_norm else None
        # Input-major, so that a shard of a weight split by input is contiguous rows.
        self.output = nn.Parameter(empty(self.num_heads * head, width))
        self.post_norm = nn.Parameter(empty(width))
        self.gate_up = nn.Parameter(empty(2 * ffn, width))
        self.down = nn.Parameter(empty(ffn, width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Runs one layer.

        Args:
            x: [B, T, D].
            cos, sin: of the tokens' positions, [B or 1, T, 1, E / 2].
            attend: attention over keys and values; see `Attend`.
        """
        h, k = self.num_heads, self.num_kv_heads
        normed = copy_to(F.rms_norm(x, x.shape[-1:], self.input_norm, self.eps), self.group)
        qkv = F.linear(normed, self.qkv, self.qkv_bias).unflatten(-1, (h + 2 * k, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, key, value = qkv.split([h, k, k], -2)
            q = F.rms_norm(q, self.q_norm.shape, self.q_norm, self.eps)
            key = F.rms_norm(key, self.k_norm.shape, self.k_norm, self.eps)
            qkv = torch.cat([q, key, value], -2)
        seen = attend(self, qkv, cos, sin)
        x = x + sum_from(seen.flatten(-2) @ self.output, self.group)
        normed = copy_to(F.rms_norm(x, x.shape[-1:], self.post_norm, self.eps), self.group)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return x + sum_from((F.silu(gate) * up) @ self.down, self.group)


class Decoder(nn.Module):
    """One rank's part of a decoder with a head: a vocabulary, or a scalar per token.

    Attributes:
        config, shard: configuration of the model, and the part of it held here.
        head_kind: "vocabulary" or "scalar".
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        shard: Shard | None = None,
        head: str = "vocabulary",
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates uninitialised weights; `hybridflow.models.pieces` fills them."""
        super().__init__()
        self.config, self.shard, self.head_kind = config, shard or Shard(config), head
        shard = self.shard
        kind = {"device": device, "dtype": dtype}
        rows = config.vocab_size // shard.num_shards
        has_vocabulary_head = head == "vocabulary" and shard.is_last
        is_tied_here = has_vocabulary_head and config.is_tied
        self.embedding = (
            nn.Parameter(torch.empty(rows, config.hidden_size, **kind))
            if shard.is_first or is_tied_here
            else None
        )
        self.layers = nn.ModuleList(Layer(config, shard, k, **kind) for k in shard.layers)
        self.norm = nn.Parameter(torch.empty(config.hidden_size, **kind)) if shard.is_last else None
        self.head = None
        if shard.is_last and not is_tied_here:
            size = rows if head == "vocabulary" else 1
            self.head = nn.Parameter(torch.empty(size, config.hidden_size, **kind))
        # Nothing is computed for a model that only says what it would hold.
        exact: dict[str, Any] = {
            "dtype": torch.float64,
            "device": "meta" if torch.device(device).type == "meta" else "cpu",
        }
        angles = torch.outer(
            torch.arange(config.max_positions, **exact),
            torch.tensor(inverse_frequencies(config), **exact),
        )
        self.register_buffer("cos", angles.cos().to(**kind)[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().to(**kind)[:, None], persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The head's rows on this shard, [vocabulary / shards, D] or [1, D]."""
        weight = self.embedding if self.head is None else self.head
        assert weight is not None, "asked of the last stage"
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, D] of tokens [B, T]."""
        assert self.embedding is not None, "asked of the first stage"
        if self.shard.group is None:
            return F.embedding(tokens, self.embedding)
        # Each shard looks up the tokens in its own rows, and adds 0 for others.
        local = tokens - self.shard.tp * len(self.embedding)
        is_ours = (local >= 0) & (local < len(self.embedding))
        found = F.embedding(local.clamp(0, len(self.embedding) - 1), self.embedding)
        return sum_from(found * is_ours.unsqueeze(-1), self.shard.group)

    def forward(
        self, x: Tensor, attend: Attend | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Runs the stage's layers.

        Args:
            x: tokens int64 [B, T] on the first stage, hidden states [B, T, D] on the others.
            attend: causal attention over the T tokens when not given.
            positions: int64 [B, T]; 0, 1, ... when not given.

        Returns:
            Hidden states [B, T, D], normalised on the last stage.
        """
        if self.shard.is_first:
            x = self.embed(x)
        if positions is None:
            if x.shape[1] > len(self.cos):
                raise ConfigError(
                    f"{x.shape[1]} tokens, and the model has {len(self.cos)} positions "
                    f"(max_position_embeddings); shorten prompts or responses"
                )
            cos, sin = self.cos[None, : x.shape[1]], self.sin[None, : x.shape[1]]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, attend or attend_causally)
        return (
            x if self.norm is None else F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        )


def attend_causally(layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention over the tokens of `qkv`; an `Attend`."""
    return see_causally(*rotate(qkv, cos, sin, layer.num_heads, layer.num_kv_heads))


def see_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of queries [B, T, H, E] over keys and values [B, T, K, E]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    seen = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return seen.transpose(1, 2)
