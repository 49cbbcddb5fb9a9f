"""Log-probability of one token a row and the row's entropy, from states that a head is applied to.

Logits [rows, vocabulary] are the largest tensor of training with a large vocabulary, and are never
laid out: they are made a block at a time and reduced to four sums a row, after "Online normalizer
calculation for softmax" (arXiv 1805.02867), and made again for the gradients. Sums over the shards
of a vocabulary merge as those over its blocks do, so that one kernel serves both.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import DataError
from shared.kernels.registry import select
from shared.kernels.token_log_probs.sums import Answer, answer, merge

__all__ = ["Answer", "answer", "gradients", "merge", "partial_sums"]


def partial_sums(
    hidden: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "vocabulary dim"],
    tokens: Int64[Tensor, " rows"],
    temperature: float = 1.0,
) -> Float[Tensor, "4 rows"]:
    """Sums over the logits l = hidden . weight / temperature of a vocabulary, or a shard of it.

    Products of half types are summed in float32. float64 is computed in torch on every device.

    Args:
        hidden: states that the head is applied to.
        weight: the head, or some consecutive rows of it.
        tokens: counted from the first row of `weight`; those outside it are in another shard.
        temperature: logits are divided by it; above 0.

    Returns:
        In float32, or float64 for such states: the top logit, the sum of exp(l - top), the sum of
        exp(l - top) (l - top), and the logit of the row's token, 0 where it is in another shard.

    Raises:
        DataError: types or shapes do not fit one another, or there is no vocabulary.
        ConfigError: as `select`.
    """
    _check(hidden, weight, tokens)
    with torch.no_grad():
        return _form(hidden).partial_sums(hidden, weight, tokens, temperature)


def gradients(
    hidden: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "vocabulary dim"],
    tokens: Int64[Tensor, " rows"],
    temperature: float,
    found: Answer,
    grad_log_probs: Float[Tensor, " rows"],
    grad_entropy: Float[Tensor, " rows"],
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "vocabulary dim"]]:
    """Gradients of `hidden` and `weight`, given those of log-probabilities and entropies.

    Both are summed over blocks of the vocabulary in float32, and then rounded to the type of what
    they are gradients of. On a GPU the slopes of logits, and what each block adds, are of the type
    of `weight`, for tensor cores.

    Args:
        hidden, weight, tokens, temperature: as `partial_sums` was given them.
        found: of the whole vocabulary.
        grad_log_probs, grad_entropy: of the type of the answer.

    Returns:
        Of `hidden`, what comes through this `weight`: shards are to be summed; and of `weight`.

    Raises:
        DataError, ConfigError: as `partial_sums`.
    """
    _check(hidden, weight, tokens)
    # With p = exp(l - normalizer), the slope of a logit is p (level + tilt (l - normalizer)), and
    # that of its log-probability more for the row's token.
    level = -grad_log_probs - grad_entropy * found.entropy
    terms = torch.stack([level, -grad_entropy, grad_log_probs]) / temperature
    terms = torch.cat([found.normalizer[None], terms])
    with torch.no_grad():
        return _form(hidden).gradients(hidden, weight, tokens, temperature, terms)


def _form(hidden: Tensor) -> ModuleType:
    if hidden.dtype == torch.float64:
        # Written in torch operations: what serves the CPU serves any device.
        return import_module("shared.kernels.token_log_probs.cpu")
    return select("token_log_probs", hidden.device)


def _check(hidden: Tensor, weight: Tensor, tokens: Tensor) -> None:
    if hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype or not len(weight):
        raise DataError(
            f"expected a head [vocabulary, {hidden.shape[1]}] of {hidden.dtype}, with a vocabulary "
            f"of at least 1, got {list(weight.shape)} of {weight.dtype}"
        )
    if len(tokens) != len(hidden):
        raise DataError(f"expected {len(hidden)} tokens, one a row, got {len(tokens)}")
