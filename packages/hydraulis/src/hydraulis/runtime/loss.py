"""The summed next-token loss of a rank's tokens, without all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from hydraulis.runtime.attention import PackedDocuments
from shared.comms import Group
from shared.errors import ConfigError
from shared.kernels.token_log_probs.autograd import token_log_probs

__all__ = ["NO_LABEL", "LossModel", "check_family", "sum_losses"]

NO_LABEL = -100
"""Label of a token whose next one is not to be learned."""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class LossModel(nn.Module):
    """A Hugging Face causal LM as a function of tokens and labels to their summed loss.

    It is called inside `attend`.
    """

    def __init__(self, model: nn.Module, *, is_sharded: bool = False) -> None:
        """Takes the model as it is.

        Args:
            model: of a family whose head is a plain product.
            is_sharded: by FSDP: then it is called as a whole and all logits are made.

        Raises:
            ConfigError: the model's family is not known to be such.
        """
        super().__init__()
        check_family(model)
        self.model = model
        self._is_sharded = is_sharded

    def forward(
        self,
        ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        labels: Int64[Tensor, " tokens"],
        packing: PackedDocuments,
    ) -> Float[Tensor, ""]:
        """Sum of the losses of tokens that have a label.

        Args:
            ids, positions: this rank's tokens, and their places in their documents.
            labels: each one's next token; NO_LABEL where there is none.
            packing: the documents.
        """
        model: Any = self.model
        # Adapters (peft) wrap the causal LM, whose layers hold them.
        decoder = model.get_base_model() if hasattr(model, "get_base_model") else model
        given = {
            "input_ids": ids[None], "position_ids": positions[None], "use_cache": False,
            "packing": packing,
        }  # fmt: skip
        if self._is_sharded:
            logits = model(**given).logits[0]
            return nn.functional.cross_entropy(
                logits.to(_wide(logits)), labels, ignore_index=NO_LABEL, reduction="sum"
            )
        hidden = decoder.base_model(**given).last_hidden_state[0]
        return sum_losses(hidden, labels, decoder.get_output_embeddings().weight)


def check_family(model: nn.Module) -> None:
    """Refuses a model whose loss may be another one than that of its head's products.

    Raises:
        ConfigError: the model's family is not known.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in _FAMILIES:
        raise ConfigError(
            f"expected a causal LM of {', '.join(_FAMILIES)}, got {kind!r}; with another one keep "
            f"your own loop, and take BalancedBatchSampler"
        )


def sum_losses(
    hidden: Float[Tensor, "tokens dim"],
    labels: Int64[Tensor, " tokens"],
    head: Float[Tensor, "vocabulary dim"],
    *,
    first_token: int = 0,
    group: Group | None = None,
) -> Float[Tensor, ""]:
    """Sum of the losses of tokens that have a label, without all logits in memory.

    Args:
        hidden: states that the head is applied to, the same on all ranks of the group.
        labels: each one's next token; NO_LABEL where there is none.
        head: one row a token of the vocabulary, or this rank's of them.
        first_token: of this rank's rows.
        group: ranks that hold rows of the head, in order; None where one holds all.
    """
    kept = (labels != NO_LABEL).nonzero()[:, 0]
    if not len(kept):  # its gradients are zeros, and there
        return 0.0 * (hidden.sum() + head.sum()).to(_wide(hidden))
    tokens = labels[kept]
    if group is not None:
        # It counts on equally many rows a rank; the last one may have fewer.
        tokens = tokens - first_token + group.rank * len(head)
    log_probs, _ = token_log_probs(hidden[kept], head, tokens, group=group)
    return -log_probs.sum()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
