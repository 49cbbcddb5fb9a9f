"""Attention by document whenever a model's input says where documents end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hydraulis.runtime.attention.by_document import DOCUMENT_ATTENTION, register_attention
from hydraulis.runtime.attention.isolation import DocumentLimits, check_isolation
from shared.errors import ConfigError

__all__ = ["hook_documents", "use_document_attention"]


def use_document_attention(model: nn.Module) -> None:
    """Lets a model's attention go by document whenever its input says where documents end.

    For loops that are not the engine's: the input is one row of packed documents beside `cu_seq_lens_q`,
    as transformers' `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes it. Other input is
    attended to as before. Activations may be recomputed.

    Args:
        model: a Hugging Face causal LM, on its device.

    Raises:
        ConfigError: two short documents that are packed get other outputs or gradients than each alone,
            so that layers of the model mix tokens otherwise; names them.
    """
    hook_documents(model, check_isolation(model))


def hook_documents(model: nn.Module, limits: DocumentLimits) -> None:
    """Adds the hooks of `use_document_attention` to a model that was checked.

    Args:
        model: a Hugging Face causal LM.
        limits: as `check_isolation` returns them.
    """
    config: Any = model.config
    before = config._attn_implementation
    register_attention()

    def choose(
        _: nn.Module, args: Any, inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        ends = inputs.get("cu_seq_lens_q")
        config._attn_implementation = before if ends is None else DOCUMENT_ATTENTION
        if ends is None:
            return None
        # Every layer asks for the lengths: they wait for the device once.
        ends = ends.cpu()
        limits.check(int(ends.diff().max()))
        mask = inputs.pop("attention_mask", None)
        masked_tokens = None if mask is None else _masked_tokens(mask, ends)
        return args, {**inputs, "cu_seq_lens_q": ends, "masked_tokens": masked_tokens}

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


def _masked_tokens(mask: Tensor, ends: Tensor) -> Tensor | None:
    """Tokens whose attention is zero; None without any.

    Raises:
        ConfigError: the mask is not of this row, or hides some tokens of a document but not all.
    """
    if tuple(mask.shape) != (1, int(ends[-1])):
        raise ConfigError(
            f"attention_mask: expected one row of {int(ends[-1])} tokens beside cu_seq_lens_q, got "
            f"{tuple(mask.shape)}"
        )
    masked_tokens = mask[0] == 0
    if not bool(masked_tokens.any()):
        return None
    for document in masked_tokens.cpu().tensor_split(ends[1:-1].long()):
        if bool(document.any()) and not bool(document.all()):
            raise ConfigError(
                "attention_mask: expected no pads inside of a packed document, got some; cut them off "
                "before documents are packed"
            )
    return masked_tokens
