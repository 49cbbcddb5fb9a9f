"""Log-probabilities and entropies of chosen tokens, without keeping the logits.

Logits are the largest tensor of training with a large vocabulary. They are made for a bounded number
of rows at a time, and made again going back, so that memory grows with the hidden size and not with
the vocabulary; with a sharded vocabulary only maxima and sums cross ranks, never logits.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.models.parallel import max_over
from shared.comms.collectives import all_reduce
from shared.comms.group import Group

__all__ = ["token_log_probs"]

_LOGITS = 1 << 24
"""Logits made at once: 64 MB in float32."""


def token_log_probs(
    hidden: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "vocabulary dim"],
    tokens: Int64[Tensor, " rows"],
    *,
    temperature: float = 1.0,
    group: Group | None = None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The log-probability of one token a row, and the entropy of the row's distribution.

    Args:
        hidden: states that the head is applied to.
        weight: the head, or this rank's rows of it.
        tokens: of the whole vocabulary.
        temperature: logits are divided by it.
        group: ranks that hold the vocabulary's other rows, in order.

    Returns:
        Both in float32, or float64 if the states are; differentiable in both arguments.
    """
    return _TokenLogProbs.apply(hidden, weight, tokens, temperature, group)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        group: Group | None,
    ) -> tuple[Tensor, Tensor]:
        local = tokens - (0 if group is None else group.rank * len(weight))
        is_ours = (local >= 0) & (local < len(weight))
        local = local.clamp(0, len(weight) - 1)
        found = []
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, temperature)
            top = max_over(logits.amax(-1), group)
            shifted = logits - top[:, None]
            exp = shifted.exp()
            chosen = shifted.gather(1, local[rows, None])[:, 0] * is_ours[rows]
            sums = torch.stack([exp.sum(-1), (exp * shifted).sum(-1), chosen])
            if group is not None:
                all_reduce(group, sums)
            log_total = sums[0].log()
            found.append(
                torch.stack([sums[2] - log_total, log_total - sums[1] / sums[0], top + log_total])
            )
        log_probs, entropy, normalizer = (
            torch.cat(found, 1) if found else _empty(hidden, weight)
        ).unbind(0)
        ctx.save_for_backward(hidden, weight, local, is_ours, entropy, normalizer)
        ctx.temperature, ctx.group = temperature, group
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, local, is_ours, entropy, normalizer = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in _chunks(len(hidden), len(weight)):
            log_p = _logits(hidden[rows], weight, ctx.temperature) - normalizer[rows, None]
            p = log_p.exp()
            slope = -p * grad_log_probs[rows, None]
            slope -= grad_entropy[rows, None] * p * (log_p + entropy[rows, None])
            slope.scatter_add_(
                1, local[rows, None], (grad_log_probs[rows] * is_ours[rows])[:, None]
            )
            slope = (slope / ctx.temperature).to(weight.dtype)
            grad_hidden[rows] = slope @ weight
            grad_weight.addmm_(slope.t(), hidden[rows])
        if ctx.group is not None:
            all_reduce(ctx.group, grad_hidden)
        return grad_hidden, grad_weight, None, None, None


def _chunks(num_rows: int, vocabulary: int) -> list[slice]:
    size = max(1, _LOGITS // max(1, vocabulary))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _empty(hidden: Tensor, weight: Tensor) -> Tensor:
    return _logits(hidden, weight, 1.0).new_empty(3, 0)
