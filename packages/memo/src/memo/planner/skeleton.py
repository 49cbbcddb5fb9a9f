"""What a transformer layer's forward leaves for its backward, by tensor, from the model's config.

The table of MEMO (arXiv 2407.12117): a GPT layer keeps 16 h elements a token. It counts each tensor
of the layer's formula once, with an attention that keeps its output and no matrix of scores. What
autograd saves in a real layer differs (norms keep copies in float32, masks of dropout, the
log-sum-exp of attention): plans are made from measured bytes, and this is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memo.config import shown
from shared.errors import ConfigError
from shared.registry import Registry

__all__ = ["SKELETONS", "Skeleton", "skeleton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """Activations that one layer keeps.

    Attributes:
        elements: elements a token and layer by the tensor's name, in the order in which they are made;
            "input" and "attention" are swapped whole, of the others any tokens may be recomputed.
        elementwise: names of those that elementwise work makes from the others: norms, activation and
            product. Recomputing them costs almost nothing.
    """

    elements: dict[str, int]
    elementwise: frozenset[str]

    def bytes_per_token(self, itemsize: int = 2, elementwise: bool = True) -> int:
        """Bytes a token and layer.

        Args:
            itemsize: bytes of an element.
            elementwise: whether those made by elementwise work count.

        Raises:
            ConfigError: the size of an element is not positive.
        """
        if itemsize < 1:
            raise ConfigError(f"itemsize: expected at least 1 byte an element, got {itemsize!r}")
        dropped = frozenset() if elementwise else self.elementwise
        return itemsize * sum(count for name, count in self.elements.items() if name not in dropped)


def _gpt2(config: Any) -> Skeleton:
    hidden = config.n_embd
    inner = config.n_inner or 4 * hidden
    elements = dict.fromkeys(
        ("input", "norm1", "q", "k", "v", "attention", "mid", "norm2"), hidden
    ) | {"up": inner, "activation": inner}
    return Skeleton(elements=elements, elementwise=frozenset({"norm1", "norm2", "activation"}))


def _llama(config: Any) -> Skeleton:
    hidden, inner, heads = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
    )
    head = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head, (config.num_key_value_heads or heads) * head
    elements = {
        "input": hidden, "norm1": hidden, "q": queries, "k": keys, "v": keys, "attention": queries,
        "mid": hidden, "norm2": hidden, "gate": inner, "up": inner, "activation": inner, "product": inner,
    }  # fmt: skip
    return Skeleton(
        elements=elements, elementwise=frozenset({"norm1", "norm2", "activation", "product"})
    )


def _qwen3(config: Any) -> Skeleton:
    """Llama's, with a norm of queries and one of keys, whose inputs and outputs are both needed."""
    plain = _llama(config)
    norms = {"norm_q": plain.elements["q"], "norm_k": plain.elements["k"]}
    return Skeleton(elements=plain.elements | norms, elementwise=plain.elementwise.union(norms))


SKELETONS: Registry[str, Callable[[Any], Skeleton]] = Registry("model type of a skeleton")
SKELETONS.add("gpt2", _gpt2, "GPT-2: one projection up, one down")
SKELETONS.add("llama", _llama, "Llama: a gated feed-forward, fewer keys and values")
SKELETONS.add("mistral", _llama, "Mistral: Llama's tensors")
SKELETONS.add("qwen2", _llama, "Qwen2: Llama's tensors")
SKELETONS.add("qwen3", _qwen3, "Qwen3: Llama's tensors, and normed queries and keys")


def skeleton(config: Any) -> Skeleton:
    """The activations that a layer of a model keeps, from the model's transformers config.

    MEMO's table (arXiv 2407.12117), in elements a token. Autograd keeps more in a real layer; plans are
    made from what it was measured to keep.

    Args:
        config: of model type gpt2, llama, mistral, qwen2 or qwen3.

    Raises:
        ConfigError: it is no config, or the model's type has no skeleton here.
    """
    if not hasattr(config, "model_type"):
        raise ConfigError(
            f"config: expected a transformers configuration, got {shown(config)}; give model.config, or read one by "
            "AutoConfig.from_pretrained"
        )
    SKELETONS.check(config.model_type)
    return SKELETONS.get(config.model_type)(config)
