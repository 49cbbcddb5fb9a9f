"""Log-probabilities of tokens from all logits in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gradients", "partial_sums"]


def partial_sums(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Sums over [rows, vocabulary] logits."""
    logits = _logits(hidden, weight, temperature)
    top = logits.amax(1)
    shifted = logits - top[:, None]
    exp = shifted.exp()
    chosen = logits.masked_fill(~_is_chosen(weight, tokens), 0).sum(1)
    return torch.stack([top, exp.sum(1), (exp * shifted).sum(1), chosen])


def gradients(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, terms: Tensor
) -> tuple[Tensor, Tensor]:
    """Through [rows, vocabulary] slopes of logits."""
    normalizer, level, tilt, chosen = terms[:, :, None]
    log_p = _logits(hidden, weight, temperature) - normalizer
    slopes = log_p.exp() * (level + tilt * log_p) + chosen * _is_chosen(weight, tokens)
    grad_hidden = slopes @ weight.to(slopes.dtype)
    grad_weight = slopes.t() @ hidden.to(slopes.dtype)
    return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ weight.to(wide).t() / temperature


def _is_chosen(weight: Tensor, tokens: Tensor) -> Tensor:
    return tokens[:, None] == torch.arange(len(weight), device=tokens.device)
