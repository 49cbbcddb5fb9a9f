"""Aggregation of token losses to one number, independent of how a batch is split.

The mean of micro-batches' means is not the mean of the batch if their lengths differ. So a
denominator is computed once per optimizer step for the global batch, by an all-reduce of
`denominator`, and each micro-batch of each rank returns its sum divided by that number: the results
add up to the loss of the whole batch. Gradients of ranks must then be summed; if they are averaged,
multiply by the number of ranks.

"Token-mean" is DAPO's (arXiv 2503.14476), "seq-mean-token-mean" GRPO's (arXiv 2402.03300),
"seq-mean-token-sum-norm" Dr. GRPO's (arXiv 2503.20783).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from shared.errors import ConfigError

__all__ = ["Mask", "Mode", "aggregate", "denominator", "masked"]

Mask = Bool[Tensor, "batch tokens"] | Float[Tensor, "batch tokens"]
Mode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]


def masked(values: Float[Tensor, "batch tokens"], mask: Mask) -> Float[Tensor, "batch tokens"]:
    """The values where the mask is not 0, elsewhere 0 without gradient, even for NaN and infinity.

    A product with the mask would turn these into NaN, in values and in gradients.
    """
    return torch.where(mask.bool(), values, 0)


def aggregate(
    losses: Float[Tensor, "batch tokens"],
    mask: Mask,
    mode: str,
    denominator: float | Shaped[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """A micro-batch's share of the loss of the global batch.

    Args:
        losses: of tokens.
        mask: of tokens that count; not 0 where they do.
        mode: one of `Mode`.
        denominator: of the optimizer step's global batch: the function `denominator`, summed by an
            all-reduce; by default this mask is the whole batch. Ignored by "token-sum".

    Returns:
        The share; 0 with a gradient of 0 if no token counts.

    Raises:
        ConfigError: the mode is none of these.
    """
    _check(mode)
    if denominator is None:
        denominator = _denominator(mask, mode)
    kept = masked(losses, mask)
    if mode == "seq-mean-token-mean":
        kept = kept / mask.bool().sum(1, keepdim=True).clamp(min=1)
    # In float64, because many small shares add up to the whole.
    total = kept.sum(dtype=torch.float64)
    if mode != "token-sum":
        divisor = torch.as_tensor(denominator, dtype=torch.float64, device=losses.device)
        total = total / torch.where(divisor == 0, 1, divisor)
    return total.to(losses.dtype)


def denominator(mask: Mask, mode: str, norm: float | None = None) -> Float[Tensor, ""]:
    """A batch's contribution to the divisor of its optimizer step; additive over batches and ranks.

    Token modes count tokens ("token-sum" does not divide, but 0 still means that no token counts);
    the others count sequences that have any token that counts.

    Args:
        mask: of tokens that count.
        mode: one of `Mode`.
        norm: constant divisor of "seq-mean-token-sum-norm", in tokens; by default the padded
            width, so pass it if batches of one step are padded to different widths.

    Returns:
        A float64 number.

    Raises:
        ConfigError: the mode is none of these, or `norm` is not positive.
    """
    _check(mode)
    if norm is not None and not norm > 0:
        raise ConfigError(f"norm: expected a positive number of tokens, got {norm}")
    if mode in ("token-mean", "token-sum"):
        return mask.bool().sum(dtype=torch.float64)
    num_sequences = mask.bool().any(1).sum(dtype=torch.float64)
    if mode == "seq-mean-token-sum-norm":
        return num_sequences * (mask.shape[1] if norm is None else norm)
    return num_sequences


# `aggregate` has an argument of this name.
_denominator = denominator


def _check(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
