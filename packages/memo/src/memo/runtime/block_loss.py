"""The loss of a causal language model without all logits in memory.

Logits [tokens, vocabulary] are the largest tensor of a long sequence. The model's own forward runs; only
its head answers with log-probabilities of the next tokens, made block by block, and its loss function
sums these up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from shared.kernels.token_log_probs.autograd import token_log_probs

__all__ = ["KNOWN", "has_block_loss", "offer_block_loss"]

_log = logging.getLogger(__name__)

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
KNOWN = {*(f"{name}ForCausalLM" for name in _FAMILIES), "GPT2LMHeadModel"}
"""Models whose logits are a product with the head's weight, and nothing else."""

_IGNORED = -100


def has_block_loss(model: nn.Module) -> bool:
    """Whether a model's loss can be computed in blocks: see `offer_block_loss`."""
    return _reason_against(_causal_of(model)) is None


def offer_block_loss(model: nn.Module) -> Callable[[], None]:
    """Has a model compute its loss in blocks where it is called with labels and with gradients.

    The output then has `loss` as before, and None as logits.

    Args:
        model: a causal language model of a known family, or what wraps one. Others, and those with a loss
            or a head of their own, are left alone, which is logged.

    Returns:
        What undoes it.
    """
    causal = _causal_of(model)
    reason = _reason_against(causal)
    if reason is not None:
        _log.info("memo: the loss of %s is left as it is: %s", type(model).__name__, reason)
        return lambda: None
    own = causal.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        is_plain = kwargs.get("return_dict") in (None, True) and causal.config.return_dict
        keep = kwargs.get("logits_to_keep", 0)
        if (
            labels is None
            or not torch.is_grad_enabled()
            or not is_plain
            or not (isinstance(keep, int) and keep == 0)
        ):
            return own(*args, **kwargs)
        return _run(causal, own, args, kwargs)

    causal.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        del causal.forward

    return undo


def _causal_of(model: nn.Module) -> Any:
    """The causal model of a known family inside of a model; None where there is none, or several."""
    found = [
        one for one in model.modules() if KNOWN & {kind.__name__ for kind in type(one).__mro__}
    ]
    return found[0] if len(found) == 1 else None


def _reason_against(model: Any) -> str | None:
    """Why a causal model's loss is left as it is; None where it can be computed in blocks."""
    if model is None:
        return "it is of no known family"
    head = model.get_output_embeddings()
    if "forward" in vars(model):
        return "its forward was replaced"
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        return "its head is more than a product"
    if model.loss_function is not ForCausalLMLoss or "_loss_function" in vars(model):
        return "it has a loss function of its own"
    return None


def _run(
    model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a model whose head and loss function are replaced meanwhile."""
    head = model.get_output_embeddings()
    targets, ignored = kwargs.get("shift_labels"), kwargs.get("ignore_index", _IGNORED)
    if targets is None:
        # Tokens before one predict it; nothing is after the last.
        targets = nn.functional.pad(kwargs["labels"], (0, 1), value=ignored)[..., 1:]

    def log_probs(hidden: Tensor) -> Tensor:
        flat = targets.reshape(-1).to(hidden.device)
        counted = flat != ignored
        rows = hidden.reshape(-1, hidden.shape[-1])[counted]
        return token_log_probs(rows, head.weight, flat[counted])[0]

    def loss(logits: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        if num_items_in_batch is None:
            return -logits.mean()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        return -logits.sum() / num_items_in_batch

    head.forward, model.loss_function = log_probs, loss
    try:
        out = forward(*args, **kwargs)
    finally:
        del head.forward
        del model._loss_function
    return type(out)(**{name: value for name, value in out.items() if name != "logits"})
