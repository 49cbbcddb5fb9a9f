"""What is planned: a model's shape, a workload, and the quality to keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from shared.errors import ConfigError
from shared.files import read_model_config

__all__ = ["FAMILIES", "Matrix", "ModelSpec", "Quality", "Workload", "columns_per_scale"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "bloom")
"""Hugging Face model types that can be planned and run."""

_HALF_BYTES = 2
_SCALE_BITS = 16


def columns_per_scale(group_size: int, in_features: int) -> int:
    """Returns how many columns of a matrix share a scale.

    Args:
        group_size: columns of a group; -1 stands for a whole row ("per channel").
        in_features: columns of the matrix, which a group never exceeds.

    Raises:
        ConfigError: the group size is neither -1 nor at least 1.
    """
    if group_size < 1 and group_size != -1:
        raise ConfigError(
            f"group_size: expected columns that share a scale, at least 1, or -1 for a whole row, got "
            f"{group_size}"
        )
    return in_features if group_size == -1 else min(group_size, in_features)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of a decoder layer.

    Attributes:
        name: its module's name inside the layer, as transformers has it.
        out_features: rows.
        in_features: columns, along which weights share scales.
        has_bias: whether a vector of `out_features` is added.
    """

    name: str
    out_features: int
    in_features: int
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only language model, from which its bytes follow exactly.

    Attributes:
        family: Hugging Face model type: llama, mistral, qwen2, qwen3, opt or bloom.
        num_layers: decoder layers, all of one shape.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the feed-forward part.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: tokens.
        matrices: of one layer.
        num_norm_weights: of one layer, biases among them.
        num_embedding_weights: token embedding, learned positions, projection, and the norm after
            them.
        num_head_weights: final norm, projection, and the head unless it is tied.
        num_own_head_weights: of a head that the files hold although the configuration ties it. It
            takes memory, but the fingerprint is the configuration's alone.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    matrices: tuple[Matrix, ...]
    num_norm_weights: int
    num_embedding_weights: int
    num_head_weights: int
    num_own_head_weights: int = 0

    @classmethod
    def from_hf(cls, source: Any) -> ModelSpec:
        """Reads a Hugging Face configuration.

        Args:
            source: a `PretrainedConfig`, its dictionary, or a model's folder (or config.json).

        Raises:
            ConfigError: there is no configuration, or the model is of another family; a
                mixture of experts is named as that.
        """
        tree, where = _read_config(source)
        family = tree.get("model_type")
        is_mixture = any("expert" in key and tree[key] for key in tree) or "moe" in str(family)
        if is_mixture or family not in FAMILIES:
            why = ": mixtures of experts are not planned" if is_mixture else ""
            raise ConfigError(
                f"{where}: expected model_type to be one of {', '.join(FAMILIES)}, got "
                f"{family!r}{why}"
            )
        try:
            return cls(family=family, **_READERS[family](tree))
        except KeyError as error:
            raise ConfigError(
                f"{where}: expected the key {error} in the configuration of a {family} model"
            ) from error

    def layer_bytes(self, bits: int, group_size: int | None = 128) -> int:
        """Bytes of one layer's weights.

        Args:
            bits: width of the matrices; 16 has neither scales nor zero points. Norms and biases
                take 16 bits.
            group_size: input columns that share a 16-bit scale and a zero point of `bits` bits;
                the last group of a row may be smaller, and -1 is a whole row. None counts neither.
        """
        num_bits = 16 * self.num_norm_weights
        for matrix in self.matrices:
            num_bits += 16 * matrix.out_features * matrix.has_bias
            num_bits += bits * matrix.out_features * matrix.in_features
            if group_size is not None and bits < 16:
                columns = columns_per_scale(group_size, matrix.in_features)
                num_groups = matrix.out_features * -(-matrix.in_features // columns)
                num_bits += num_groups * (_SCALE_BITS + bits)
        return -(-num_bits // 8)

    def kv_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of one layer's keys and values at 16 bits, for `batch` sequences of `tokens`."""
        return 2 * _HALF_BYTES * batch * tokens * self.num_kv_heads * self.head_dim

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding, with positions and the norm after it where there are any."""
        return _HALF_BYTES * self.num_embedding_weights

    @property
    def head_bytes(self) -> int:
        """Bytes of the final norm, and of the head unless it is tied to the embedding."""
        return _HALF_BYTES * (self.num_head_weights + self.num_own_head_weights)

    def activation_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of one layer's temporaries at 16 bits, for `tokens` new tokens of each sequence.

        Attention is fused, so that no matrix of scores is held.
        """
        # While queries are rotated, four of their size are held; keys, their rotation, and values beside.
        attention = (4 * self.num_heads + 3 * self.num_kv_heads) * self.head_dim
        widest = max(attention, 3 * self.intermediate_size)
        return _HALF_BYTES * batch * tokens * (3 * self.hidden_size + widest)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ between models of different shapes."""
        shape = asdict(self)
        del shape["num_own_head_weights"]
        text = json.dumps(shape, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A batch of prompts, for which a plan is made.

    Attributes:
        num_prompts: prompts in the batch.
        prompt_tokens: tokens of each prompt; of the longest, as shorter ones are padded.
        new_tokens: tokens generated for each prompt.
        waves: prompts and tokens of the longest one of each batch, where batches differ; memory has to
            hold any of them, and seconds are those of the batch above.

    Raises:
        ConfigError: a number is below 1.
    """

    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    waves: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for key in ("num_prompts", "prompt_tokens", "new_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"Workload.{key}: expected at least 1, got {getattr(self, key)}")

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """Prompts, and tokens of the longest one, of each batch that memory has to hold."""
        return (*self.waves, (self.num_prompts, self.prompt_tokens))

    @property
    def most_prompts(self) -> int:
        """Prompts of the largest batch."""
        return max(rows for rows, _ in self.batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How much quality may be given up for speed.

    Attributes:
        max_kl: highest expected divergence of the plan's next-token distribution from the
            unquantised model's, in nats a token; None sets no limit.
        theta: seconds that a nat a token is worth, added to a plan's time; 0 compares time alone.

    Raises:
        ConfigError: a number is below 0 or not finite.
    """

    max_kl: float | None = None
    theta: float = 0.0

    def __post_init__(self) -> None:
        if self.max_kl is not None and not (isfinite(self.max_kl) and self.max_kl >= 0):
            raise ConfigError(
                f"Quality.max_kl: expected nats a token, 0 or more, got {self.max_kl}; "
                f"leave it out to set no limit"
            )
        if not (isfinite(self.theta) and self.theta >= 0):
            raise ConfigError(f"Quality.theta: expected 0 or more, got {self.theta}")


def _read_config(source: Any) -> tuple[dict[str, Any], str]:
    """The configuration as a dictionary, and its name for errors."""
    if isinstance(source, Mapping):
        return dict(source), "configuration"
    if hasattr(source, "to_dict"):
        return source.to_dict(), type(source).__name__
    tree, path = read_model_config(source)
    return tree, str(path)


def _read_gated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, Mistral, Qwen2 and Qwen3: root mean square norms, a gate, rotary positions."""
    family = tree["model_type"]
    hidden, inner, heads = (
        tree["hidden_size"], tree["intermediate_size"], tree["num_attention_heads"]
    )  # fmt: skip
    kv_heads = tree.get("num_key_value_heads") or heads
    head_dim = tree.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    is_biased = family == "qwen2" or (
        family in ("llama", "qwen3") and bool(tree.get("attention_bias"))
    )
    is_mlp_biased = family == "llama" and bool(tree.get("mlp_bias"))
    matrices = (
        Matrix("self_attn.q_proj", heads * head_dim, hidden, is_biased),
        Matrix("self_attn.k_proj", kv_heads * head_dim, hidden, is_biased),
        Matrix("self_attn.v_proj", kv_heads * head_dim, hidden, is_biased),
        Matrix("self_attn.o_proj", hidden, heads * head_dim, is_biased and family != "qwen2"),
        Matrix("mlp.gate_proj", inner, hidden, is_mlp_biased),
        Matrix("mlp.up_proj", inner, hidden, is_mlp_biased),
        Matrix("mlp.down_proj", hidden, inner, is_mlp_biased),
    )
    embedding = tree["vocab_size"] * hidden
    return {
        "num_layers": tree["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": tree["vocab_size"],
        "matrices": matrices,
        "num_norm_weights": 2 * hidden + (2 * head_dim if family == "qwen3" else 0),
        "num_embedding_weights": embedding,
        "num_head_weights": hidden + (0 if tree.get("tie_word_embeddings") else embedding),
    }


def _read_opt(tree: Mapping[str, Any]) -> dict[str, Any]:
    hidden, inner, heads = tree["hidden_size"], tree["ffn_dim"], tree["num_attention_heads"]
    is_biased = tree.get("enable_bias", True)
    norm = 2 * hidden if tree.get("layer_norm_elementwise_affine", True) else 0
    has_final_norm = tree.get("do_layer_norm_before", True) and not tree.get(
        "_remove_final_layer_norm", False
    )
    width = tree.get("word_embed_proj_dim") or hidden
    projection = hidden * width if width != hidden else 0
    embedding = tree["vocab_size"] * width
    # Positions begin at 2, in every OPT model.
    positions = (tree["max_position_embeddings"] + 2) * hidden
    matrices = tuple(
        Matrix(name, out, into, is_biased)
        for name, out, into in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden, hidden),
            ("self_attn.v_proj", hidden, hidden),
            ("self_attn.out_proj", hidden, hidden),
            ("fc1", inner, hidden),
            ("fc2", hidden, inner),
        )
    )
    return {
        "num_layers": tree["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": tree["vocab_size"],
        "matrices": matrices,
        "num_norm_weights": 2 * norm,
        "num_embedding_weights": embedding + positions + projection,
        "num_head_weights": (norm if has_final_norm else 0)
        + projection
        + (0 if tree.get("tie_word_embeddings", True) else embedding),
    }


def _read_bloom(tree: Mapping[str, Any]) -> dict[str, Any]:
    hidden = tree.get("hidden_size") or tree["n_embed"]
    heads = tree.get("n_head") or tree["num_attention_heads"]
    embedding = tree["vocab_size"] * hidden
    return {
        "num_layers": tree.get("n_layer") or tree["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": tree["vocab_size"],
        "matrices": (
            Matrix("self_attention.query_key_value", 3 * hidden, hidden, True),
            Matrix("self_attention.dense", hidden, hidden, True),
            Matrix("mlp.dense_h_to_4h", 4 * hidden, hidden, True),
            Matrix("mlp.dense_4h_to_h", hidden, 4 * hidden, True),
        ),
        "num_norm_weights": 4 * hidden,
        "num_embedding_weights": embedding + 2 * hidden,
        "num_head_weights": 2 * hidden
        + (0 if tree.get("tie_word_embeddings", True) else embedding),
    }


_READERS = {
    "llama": _read_gated,
    "mistral": _read_gated,
    "qwen2": _read_gated,
    "qwen3": _read_gated,
    "opt": _read_opt,
    "bloom": _read_bloom,
}
