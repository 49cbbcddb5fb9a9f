"""Corrections for the mismatch between the sampler's and the trainer's policy.

Kernels and precision differ between the two, and so do log-probabilities under the same weights.
Truncated importance weights min(pi_old / pi_rollout, C) multiply the losses of tokens; rejection
removes tokens or sequences whose ratio is out of bounds.

Rejected tokens still count in the denominator; otherwise a batch with more rejections would give
the rest more weight. So pass the mask that `keep` returns to the loss function, which is 0 outside
it, and the original mask to `aggregate` and `denominator`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.rl import kl
from hybridflow.rl.aggregate import Mask, masked
from hybridflow.rl.registry import LEVELS
from shared.errors import ConfigError

__all__ = ["Level", "keep", "mismatch", "sequence_level", "token_level", "weights"]

Level = str
"""Name of a level, one of `hybridflow.rl.registry.LEVELS`."""


@torch.no_grad()
def weights(
    old_logp: Float[Tensor, "batch tokens"],
    rollout_logp: Float[Tensor, "batch tokens"],
    mask: Mask,
    *,
    level: str = "token",
    cap: float = 2.0,
) -> Float[Tensor, "batch tokens"]:
    """Truncated importance weights: constant factors of token losses.

    Args:
        old_logp: log-probabilities computed by the trainer with its weights before the update.
        rollout_logp: log-probabilities computed by the sampler.
        mask: of tokens that count.
        level: a name of `LEVELS`: "token" uses the ratio of each token, "sequence" the product over
            its sequence.
        cap: C, upper bound of a weight.

    Returns:
        Weights; 0 where masked.

    Raises:
        ConfigError: there is no such level, or the cap is not positive.
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
        level: "token" rejects tokens by their ratio, "sequence" sequences by the product of ratios.
        bounds: smallest and largest ratio that is kept.

    Raises:
        ConfigError: there is no such level, or the bounds are not ordered.
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
    """Measures of the mismatch of sampler and trainer, as sums additive over batches and ranks.

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
    """Ratio of each token or its sequence; at token level 1 where masked."""
    log_ratio = LEVELS.get(level)(masked(old_logp - rollout_logp, mask))
    return log_ratio.clamp(-20, 20).exp()


def token_level(log_ratio: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
    """Each token's own log-ratio."""
    return log_ratio


def sequence_level(log_ratio: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
    """The sum over a token's sequence: the log-ratio of the whole."""
    return log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
