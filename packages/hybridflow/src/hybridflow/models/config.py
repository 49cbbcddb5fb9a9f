"""Configuration of a decoder of the Llama family, read from Hugging Face's config.json.

Llama, Mistral, Qwen2 and Qwen3 differ in biases, in norms of queries and keys, and in scaling of
positions. Unsupported values are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow.models.end_tokens import list_ids, read_end_tokens
from shared.errors import ConfigError
from shared.files import read_model_config

__all__ = ["PRESETS", "DecoderConfig", "read_config"]

FAMILIES = {
    "llama": (),
    "mistral": ("num_key_value_heads", "sliding_window"),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
"""Families, and fields that are required because Hugging Face's defaults for them vary."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "small-llama": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Configurations of randomly initialised models, by NAME in "config:NAME"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and variants; some of Hugging Face's names are shortened.

    Attributes:
        has_qkv_bias: queries, keys and values have biases, as in Qwen2.
        has_qk_norm: queries and keys are normalised by head, as in Qwen3.
        rope: base and scaling of rotary positions, as `rope_parameters`.
        raw: the whole of config.json, for export.
        end_tokens: ids of the tokens that end the model's responses; empty if it names none.
        folder: the folder that it was read from; None if from elsewhere.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    initializer_range: float = 0.02
    rope: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)
    end_tokens: tuple[int, ...] = field(default=(), compare=False)
    folder: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} must be a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    @staticmethod
    def parse(tree: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        """Reads the fields of a config.json, or of a configuration's `to_dict()`.

        Raises:
            ConfigError: if the family, or a field's value, is not supported.
        """
        family = tree.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                f"{where}: model_type {family!r} is none of {', '.join(FAMILIES)}; other causal "
                f"language models are not supported yet"
            )
        absent = [name for name in FAMILIES[family] if name not in tree]
        if absent:
            raise ConfigError(
                f"{where}: expected {', '.join(absent)}, got none; defaults for {family} vary, so "
                f"write the value explicitly (null is a value too)"
            )
        activation = tree.get("hidden_act", "silu")
        if activation != "silu" or tree.get("mlp_bias") or tree.get("pretraining_tp", 1) != 1:
            raise ConfigError(
                f"{where}: expected hidden_act 'silu', no mlp_bias and pretraining_tp 1, got "
                f"{activation!r}, {tree.get('mlp_bias')} and {tree.get('pretraining_tp')}"
            )
        if tree.get("attention_bias") and family != "qwen2":
            raise ConfigError(f"{where}: attention_bias is not supported for {family}")
        is_sliding = tree.get("use_sliding_window", family == "mistral")
        window, positions = tree.get("sliding_window"), int(tree["max_position_embeddings"])
        if is_sliding and window is not None and window < positions:
            raise ConfigError(
                f"{where}: attention over a sliding window of {window} is not supported; set "
                f"max_position_embeddings to at most that, or sliding_window to null"
            )
        heads = int(tree["num_attention_heads"])
        return DecoderConfig(
            vocab_size=int(tree["vocab_size"]),
            hidden_size=int(tree["hidden_size"]),
            ffn_size=int(tree["intermediate_size"]),
            num_layers=int(tree["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(tree.get("num_key_value_heads") or heads),
            head_dim=int(tree.get("head_dim") or tree["hidden_size"] // heads),
            norm_eps=float(tree.get("rms_norm_eps", 1e-6)),
            max_positions=positions,
            is_tied=bool(tree.get("tie_word_embeddings", False)),
            has_qkv_bias=family == "qwen2",
            has_qk_norm=family == "qwen3",
            initializer_range=float(tree.get("initializer_range", 0.02)),
            rope=_rope(tree, where),
            raw=dict(tree),
            end_tokens=list_ids(tree.get("eos_token_id"), where),
        )


def read_config(model: Any) -> DecoderConfig:
    """The configuration that a user's `model` names.

    Args:
        model: "config:NAME" of a preset, a folder with config.json, a mapping of its fields, or a
            Hugging Face configuration or model.

    Raises:
        ConfigError: if it is none of these.
        DataError: if the folder has no config.json, or one that is no JSON.
    """
    if isinstance(model, DecoderConfig):
        return model
    if isinstance(model, str) and model.startswith("config:"):
        name = model.removeprefix("config:")
        if name not in PRESETS:
            raise ConfigError(f"model: no preset {name!r}; there are {', '.join(PRESETS)}")
        return DecoderConfig.parse(PRESETS[name], model)
    if isinstance(model, str | Path):
        presets = f"config:NAME for one of {', '.join(PRESETS)}"
        tree, path = read_model_config(model, presets, may_be_file=False)
        try:
            config = DecoderConfig.parse(tree, str(path))
            return replace(
                config, end_tokens=read_end_tokens(path.parent, tree), folder=path.parent
            )
        except KeyError as error:
            raise ConfigError(f"{path}: expected the key {error}, got none; add it") from error
    if isinstance(model, Mapping):
        return DecoderConfig.parse(model, "model")
    found = getattr(model, "config", model)
    if hasattr(found, "to_dict"):
        config = DecoderConfig.parse(found.to_dict(), type(found).__name__)
        named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        if named is None:
            return config
        return replace(
            config, end_tokens=list_ids(named, f"{type(model).__name__}.generation_config")
        )
    raise ConfigError(
        f"model: expected config:NAME, a folder, a mapping of config.json's fields, or a Hugging "
        f"Face configuration, got a {type(model).__name__}"
    )


def _rope(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = dict(tree.get("rope_parameters") or tree.get("rope_scaling") or {})
    found.setdefault("rope_theta", tree.get("rope_theta", 10000.0))
    kind = found.setdefault("rope_type", found.pop("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"{where}: positions scaled by {kind!r} are not supported; default, linear and llama3 are"
        )
    return found


def inverse_frequencies(config: DecoderConfig) -> list[float]:
    """Rotary angles per position, in radians, of each pair of a head's dimensions [head_dim / 2].

    The llama3 scaling is that of Llama 3.1: long wavelengths are stretched by a factor, short ones
    kept, those between interpolated.
    """
    rope, dim = config.rope, config.head_dim
    plain = [float(rope["rope_theta"]) ** (-k / dim) for k in range(0, dim, 2)]
    if rope["rope_type"] == "default":
        return plain
    factor = float(rope["factor"])
    if rope["rope_type"] == "linear":
        return [value / factor for value in plain]
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])

    def scaled(value: float) -> float:
        turns = original * value / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * value / factor + share * value

    return [scaled(value) for value in plain]
