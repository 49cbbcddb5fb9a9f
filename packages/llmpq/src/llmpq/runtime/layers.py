"""Decoder layers sliced from a transformers model: a stage runs transformers' own forward on them.

The model is built on the meta device, without memory. A stage keeps its layers; what belongs to other
stages is taken out, so that the body's forward accepts hidden states in place of tokens and returns
them in place of logits. The first stage keeps embedding, final norm and head.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import Cache

from llmpq.config import ModelSpec
from llmpq.runtime.weights.quantization import read_quantization
from shared.errors import ConfigError

__all__ = ["HEAD", "StageModel", "build", "most_positions", "read_config"]

HEAD = "lm_head"
"""The head's module in every family."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a family keeps its parts: the body, its list of layers, and what stands before and after."""

    body: str
    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]


_GATED = _Names("model", "layers", ("embed_tokens",), ("norm",))
_NAMES = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "opt": _Names(
        "model.decoder",
        "layers",
        ("embed_tokens", "embed_positions", "project_in"),
        ("final_layer_norm", "project_out"),
    ),
    "bloom": _Names(
        "transformer", "h", ("word_embeddings", "word_embeddings_layernorm"), ("ln_f",)
    ),
}


def most_positions(folder: str | Path) -> int | None:
    """Tokens for which a model has learned positions; None where they are computed and go on."""
    config = read_config(folder)
    return config.max_position_embeddings if config.model_type == "opt" else None


def read_config(folder: str | Path) -> PretrainedConfig:
    """The configuration of a Hugging Face model's folder.

    Raises:
        ConfigError: there is none, or its family cannot be run.
    """
    ModelSpec.from_hf(folder)
    read_quantization(folder)
    config = AutoConfig.from_pretrained(folder)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        # Their angles follow the longest sequence seen, which differs from stage to stage.
        raise ConfigError(
            f"{folder}: expected angles of positions that depend on the position alone, got rope_type "
            f"{kind!r}; it cannot be run in stages"
        )
    return config


class _Nothing(nn.Module):
    """Stands for positions that an earlier stage has added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class StageModel(nn.Module):
    """One stage's part of a model; parameters are on the meta device until they are loaded.

    Attributes:
        config: of the whole model.
        names: for each parameter's owner here, its name in the whole model.
        layers: this stage's decoder layers.
        has_ends: whether it holds embedding, final norm and head.
    """

    def __init__(self, config: PretrainedConfig, low: int, high: int, *, has_ends: bool) -> None:
        """Builds the layers low to high - 1."""
        super().__init__()
        whole: Any = build(config)
        found = _NAMES[config.model_type]
        body = whole.get_submodule(found.body)
        layers = getattr(body, found.layers)
        self.config, self.has_ends, self.low = config, has_ends, low
        self.names: dict[str, str] = {}
        self.layers = nn.ModuleList(layers[low:high])
        for here, layer in enumerate(self.layers):
            self.names[f"layers.{here}"] = f"{found.body}.{found.layers}.{low + here}"
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    object.__setattr__(module, "layer_idx", here)  # of this stage's cache
        self.after = nn.ModuleList()
        for name in found.after:
            module = getattr(body, name)
            # Called here, on the hidden states that the last stage returns.
            setattr(body, name, None if config.model_type == "opt" else nn.Identity())
            if has_ends and module is not None:
                self.names[f"after.{len(self.after)}"] = f"{found.body}.{name}"
                self.after.append(module)
        self.before = nn.ModuleList()
        for name in found.before:
            module = getattr(body, name)
            if has_ends and module is not None:
                self.names[f"before.{len(self.before)}"] = f"{found.body}.{name}"
                self.before.append(module)
            elif not has_ends:
                setattr(body, name, _without(name))
        self.head: Any = whole.get_output_embeddings() if has_ends else None
        is_tied = self.head is not None and self.head.weight is whole.get_input_embeddings().weight
        if has_ends and not is_tied:
            self.names["head"] = HEAD
        self.is_tied = is_tied
        setattr(body, found.layers, nn.ModuleList())
        if getattr(config, "layer_types", None):
            # The body looks up by a layer's place in its list which mask it gets.
            body.config = copy(config)
            body.config.layer_types = config.layer_types[low:high]
        # Not a submodule: its parameters are those above, under other names.
        self._body, self._list_name = [body], found.layers
        # transformers 5 came to call the argument `cache`.
        is_new = "cache" in signature(body.forward).parameters
        self._cache_name = "cache" if is_new else "past_key_values"

    def forward(
        self, x: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Cache
    ) -> Tensor:
        """Runs the layers on new tokens.

        Args:
            x: token ids [rows, tokens] on a stage with ends, hidden states [rows, tokens, width]
                elsewhere.
            attention_mask: 1 for tokens that count, those in the cache first [rows, all tokens].
            position_ids: of the new tokens [rows, tokens].
            cache: of these rows.

        Returns:
            Hidden states [rows, tokens, width].
        """
        (body,) = self._body
        setattr(body, self._list_name, self.layers)
        inputs: dict[str, Any] = {"input_ids": x} if self.has_ends else {"inputs_embeds": x}
        if self.config.model_type != "bloom":
            inputs["position_ids"] = position_ids
        inputs[self._cache_name] = cache
        found = body(**inputs, attention_mask=attention_mask, use_cache=True)
        return found.last_hidden_state

    def to_device(self, device: torch.device) -> None:
        """Moves all that is loaded, and the tables of angles, to a device."""
        self.to(device)
        (body,) = self._body
        if hasattr(body, "rotary_emb"):
            body.rotary_emb.to(device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of hidden states [rows, width]."""
        assert self.head is not None, "only the first stage has the head"
        for module in self.after:
            hidden = module(hidden)
        return self.head(hidden).float()


def build(config: PretrainedConfig) -> nn.Module:
    """The whole model on the meta device; tables of angles are computed on the CPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.eval()
    for module in model.modules():
        for name, child in module.named_children():
            if name == "rotary_emb":
                setattr(module, name, type(child)(config))
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise ConfigError(
            f"expected a {config.model_type} model whose buffers are angles alone, got {left}; "
            f"this version of transformers keeps others"
        )
    return model


def _without(name: str) -> nn.Module | None:
    if name == "embed_positions":
        return _Nothing()
    if name == "word_embeddings_layernorm":
        return nn.Identity()
    return None
