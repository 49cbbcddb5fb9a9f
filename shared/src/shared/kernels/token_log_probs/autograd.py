"""Log-probabilities and entropies of given tokens, which autograd differentiates.

Logits are computed in blocks, and recomputed in the backward pass, so that memory grows with the
hidden size instead of the vocabulary. With a sharded vocabulary ranks exchange four sums per row
instead of logits, after the vocabulary-parallel loss of Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.comms.collectives import all_gather, all_reduce
from shared.comms.group import Group
from shared.kernels.token_log_probs import Answer, answer, gradients, merge, partial_sums

__all__ = ["token_log_probs"]


def token_log_probs(
    hidden: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "vocabulary dim"],
    tokens: Int64[Tensor, " rows"],
    *,
    temperature: float = 1.0,
    group: Group | None = None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The log-probability of one token per row, and the entropy of the row's distribution.

    Under `torch.autocast` states and head are rounded to its type, as those of a linear layer; sums stay
    wide.

    Args:
        hidden: hidden states, the head's input; the same on all ranks of the group, as their
            gradient is, which is summed over the shards.
        weight: the head, or this rank's rows of it.
        tokens: token ids in the whole vocabulary.
        temperature: divides the logits; above 0.
        group: ranks that hold the vocabulary's rows, in order and equally many each.

    Returns:
        Both in float32, or float64 if the states are; differentiable in both arguments.

    Raises:
        DataError: `hidden` and `weight` are of different types or widths, or there is not one
            token a row.
        CommError: if a peer died or the timeout passed.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
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
        if group is not None:
            tokens = tokens - group.rank * len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            sums = partial_sums(hidden, weight, tokens, temperature)
        if group is not None:
            sums = merge(torch.stack(all_gather(group, sums), 1))
        found = answer(sums)
        ctx.save_for_backward(hidden, weight, tokens, *found)
        ctx.temperature, ctx.group = temperature, group
        return found.log_probs, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        hidden, weight, tokens, *found = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight = gradients(
                hidden, weight, tokens, ctx.temperature, Answer(*found), *grads
            )
        if ctx.group is not None:
            all_reduce(ctx.group, grad_hidden)
        return grad_hidden, grad_weight, None, None, None
