"""A model as the search sees it: its role in the algorithm, and a transformer's sizes.

Parameters are counted as in a dense decoder with a gated feed-forward part and no biases, such as
Llama; some more norms and biases do not change a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from shared.errors import ConfigError
from shared.registry import Registry

__all__ = ["LLAMA_SIZES", "ROLES", "ModelSpec"]

ROLES = ("actor", "critic", "reference", "reward", "cost")
"""Roles of models in a step."""

LLAMA_SIZES: Registry[str, tuple[int, ...]] = Registry("size")
"""Sizes of `ModelSpec.llama`: layers, hidden, heads, KV heads and feed-forward."""
LLAMA_SIZES.add("7B", (32, 4096, 32, 32, 11008), "Llama 2 7B")
LLAMA_SIZES.add("13B", (40, 5120, 40, 40, 13824), "Llama 2 13B")
LLAMA_SIZES.add("34B", (48, 8192, 64, 8, 22016), "Code Llama 34B")
LLAMA_SIZES.add("70B", (80, 8192, 64, 8, 28672), "Llama 2 70B")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model of an RLHF dataflow.

    Attributes:
        name: unique among the models that are placed together.
        role: one of `ROLES`; actors and critics are trained.
        num_params: parameters, embeddings and head included.
        num_layers: transformer layers; a pipeline stage has whole ones.
        hidden_size: width of the residual stream.
        num_heads: query heads; tensor parallelism splits them evenly.
        num_kv_heads: key and value heads; replicated if there are fewer than tensor ranks.
        head_size: width of one head.
        ffn_size: inner width of the feed-forward part.
        vocab_size: width of the logits of an actor or reference.
    """

    name: str
    role: str
    num_params: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(
                f"model {self.name!r}: expected a role of {', '.join(ROLES)}, got {self.role!r}"
            )
        for item in fields(self)[2:]:
            value = getattr(self, item.name)
            if value < 1:
                raise ConfigError(
                    f"model {self.name!r}: expected {item.name} of at least 1, got {value}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name!r}: expected num_heads {self.num_heads} to be a multiple of "
                f"num_kv_heads {self.num_kv_heads}; check the model's config"
            )

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients and an optimizer."""
        return self.role in ("actor", "critic")

    @property
    def logits_size(self) -> int:
        """Outputs per token: the vocabulary for a policy, one number for other models."""
        return self.vocab_size if self.role in ("actor", "reference") else 1

    @classmethod
    def llama(cls, size: str, role: str, name: str | None = None) -> ModelSpec:
        """A Llama of one of `LLAMA_SIZES`, named after its role unless a name is given.

        Raises:
            ConfigError: the size is unknown.
        """
        layers, hidden, heads, kv_heads, ffn = LLAMA_SIZES.get(size)
        shape = {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": hidden // heads,
            "ffn_size": ffn,
            "vocab_size": 32_000,
        }
        return cls(name=name or role, role=role, num_params=_count(shape), **shape)

    @classmethod
    def from_config(
        cls, config: Any, role: str, name: str | None = None, *, num_params: int | None = None
    ) -> ModelSpec:
        """The model that a Hugging Face config describes.

        Args:
            config: any object with `num_hidden_layers`, `hidden_size`, `num_attention_heads`,
                `intermediate_size` and `vocab_size`; `num_key_value_heads`, `head_dim` and
                `tie_word_embeddings` are read where they are present.
            role: one of `ROLES`.
            name: its role when not given.
            num_params: computed from the config when not given; needed for a model whose
                feed-forward part is not gated.

        Raises:
            ConfigError: an attribute is missing, or the model is a mixture of experts, where a
                token uses only some of the parameters.
        """
        experts = ("num_local_experts", "num_experts", "n_routed_experts")
        if any((getattr(config, key, None) or 1) > 1 for key in experts):
            raise ConfigError(
                f"{type(config).__name__}: expected a dense model, got a mixture of experts, "
                "which these formulas do not describe"
            )
        hidden, heads = _read(config, "hidden_size"), _read(config, "num_attention_heads")
        shape = {
            "num_layers": _read(config, "num_hidden_layers"),
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_size": getattr(config, "head_dim", None) or hidden // heads,
            "ffn_size": _read(config, "intermediate_size"),
            "vocab_size": _read(config, "vocab_size"),
        }
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        num_params = num_params or _count(shape, num_embeddings=1 if is_tied else 2)
        return cls(name=name or role, role=role, num_params=num_params, **shape)


def _read(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int):
        raise ConfigError(
            f"{type(config).__name__}: expected a whole number as {key}, got {value!r}; "
            "construct ModelSpec by hand"
        )
    return value


def _count(shape: dict[str, int], num_embeddings: int = 2) -> int:
    hidden = shape["hidden_size"]
    projections = 2 * (shape["num_heads"] + shape["num_kv_heads"]) * shape["head_size"]
    layer = hidden * (projections + 3 * shape["ffn_size"] + 2)
    return shape["num_layers"] * layer + hidden * (num_embeddings * shape["vocab_size"] + 1)
