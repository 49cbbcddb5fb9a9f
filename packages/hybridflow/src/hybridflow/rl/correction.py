"""The sampler is not quite the trainer's policy: what its tokens are worth to the trainer.

Kernels and precision differ, so that log-probabilities of the same weights do. Truncated importance
weights min(pi_old / pi_rollout, C) multiply losses of tokens; rejection takes tokens or sequences
out whose ratio is out of bounds.

What was rejected still counts in the denominator, as otherwise a batch of which more is rejected
would weigh the rest more: give the mask that `keep` returns to the loss function, which is 0
outside it, and the mask from before to `aggregate` and `denominator`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.rl import kl
from hybridflow.rl.aggregate import Mask, masked
from shared.errors import ConfigError

__all__ = ["Level", "keep", "mismatch", "weights"]

Level = Literal["token", "sequence"]


@torch.no_grad()
def weights(
    old_logp: Float[Tensor, "batch tokens"],
    rollout_logp: Float[Tensor, "batch tokens"],
    mask: Mask,
    *,
    level: str = "token",
    cap: float = 2.0,
) -> Float[Tensor, "batch tokens"]:
    """Truncated importance weights, as constants: a factor for the losses of tokens.

    Args:
        old_logp: log-probabilities by the trainer, of the weights that sampled.
        rollout_logp: by the sampler itself.
        mask: of tokens that count.
        level: "token" by the ratio of each, "sequence" by the product of a sequence's ratios.
        cap: C, the most a weight can be.

    Returns:
        Weights; 0 where masked.

    Raises:
        ConfigError: the level is neither, or the cap is not positive.
    """
    if not cap > 0:
        raise ConfigError(f"cap: expected a positive number, got {cap}")
    return masked(_ratio(old_logp, rollout_logp, mask, level).clamp(max=cap), mask)


@torch.no_grad()
def keep(
    old_logp: Float[Tensor, "batch tokens"],
    rollout_logp: Float[Tensor, "batch tokens"],
    mask: Mask,
    *,
    level: str = "token",
    bounds: tuple[float, float] = (0.5, 2.0),
) -> Bool[Tensor, "batch tokens"]:
    """The mask without tokens or sequences whose ratio is out of bounds, or NaN.

    Args:
        old_logp: as of `weights`.
        rollout_logp: as of `weights`.
        mask: of tokens that count.
        level: what is rejected, by the ratio of each token or by the product over a sequence.
        bounds: least and greatest ratio that is kept.

    Raises:
        ConfigError: the level is neither, or the bounds are not ordered.
    """
    low, high = bounds
    if not 0 <= low <= high:
        raise ConfigError(f"bounds: expected 0 <= low <= high, got ({low}, {high})")
    ratio = _ratio(old_logp, rollout_logp, mask, level)
    return mask.bool() & (ratio >= low) & (ratio <= high)


@torch.no_grad()
def mismatch(
    old_logp: Float[Tensor, "batch tokens"],
    rollout_logp: Float[Tensor, "batch tokens"],
    mask: Mask,
) -> dict[str, Float[Tensor, ""]]:
    """How far the sampler is from the trainer, as sums that add up over batches and ranks.

    Returns:
        The number of "tokens"; sums over them of "k1" and "k3", estimates of
        KL(rollout || trainer), of "absolute" differences of log-probabilities, and of
        "square_ratio", whose mean less 1 is the chi-squared divergence.
    """
    pair = (rollout_logp, old_logp, mask)
    return {
        "tokens": mask.bool().sum().to(old_logp.dtype),
        "k1": kl.k1(*pair).sum(),
        "k3": kl.k3(*pair).sum(),
        "absolute": kl.absolute(*pair).sum(),
        "square_ratio": masked(_ratio(old_logp, rollout_logp, mask, "token").square(), mask).sum(),
    }


def _ratio(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    """Of each token, by itself or by its sequence; 1 where masked on the level of tokens."""
    if level not in get_args(Level):
        raise ConfigError(f"level: expected one of {', '.join(get_args(Level))}, got {level!r}")
    log_ratio = masked(old_logp - rollout_logp, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-20, 20).exp()
