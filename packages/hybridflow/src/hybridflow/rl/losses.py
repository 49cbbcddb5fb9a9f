"""Token losses of policies, by the ratio to the policy that sampled, and of critics.

Each returns [batch, tokens], 0 without gradient where masked; `aggregate` reduces them to a number.
Policy losses have the same first arguments (logp, old_logp, advantages, mask), so that one can
replace another, also as `functools.partial(ppo, clip=(0.2, 0.28))`. Log-ratios are bounded to +-20.

PPO (arXiv 1707.06347) with two bounds as in DAPO (2503.14476) and a dual clip (1912.09729); GSPO
(2507.18071); CISPO (2506.13585).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hybridflow.rl.aggregate import Mask, masked
from hybridflow.rl.kl import k3
from shared.errors import ConfigError

__all__ = ["cispo", "diagnostics", "gspo", "ppo", "reinforce", "value"]


def ppo(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Mask,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = 3.0,
) -> Float[Tensor, "batch tokens"]:
    """max(-r A, -clip(r, 1 - low, 1 + high) A), and where A < 0 at most -dual_clip * A.

    Args:
        logp: log-probabilities of the tokens under the policy that is trained.
        old_logp: under the policy that sampled; a constant.
        advantages: A, constants.
        mask: of tokens that count.
        clip: low and high: distances of the ratio r below and above 1 beyond which it is clipped.
        dual_clip: ratio beyond which a token with A < 0 has no gradient; None: no such bound.

    Raises:
        ConfigError: a bound is negative or NaN, or `dual_clip` is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip: expected a ratio above 1, or None, got {dual_clip}")
    ratio, scale = _log_ratio(logp, old_logp, mask).exp(), masked(advantages, mask)
    loss = torch.maximum(-ratio * scale, -_clipped(ratio, clip) * scale)
    if dual_clip is None:
        return loss
    return torch.where(scale < 0, torch.minimum(loss, -dual_clip * scale), loss)


def gspo(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Mask,
    clip: tuple[float, float] = (3e-4, 4e-4),
) -> Float[Tensor, "batch tokens"]:
    """PPO's loss with the geometric mean of a sequence's ratios in place of each token's.

    Its value is the sequence's, its gradient the token's own, so that aggregation by
    "seq-mean-token-mean" gives the sequence's gradient.

    Args:
        logp: as of `ppo`.
        old_logp: as of `ppo`.
        advantages: as of `ppo`; the paper has one for all tokens of a sequence.
        mask: as of `ppo`.
        clip: low and high of the sequence's ratio; by default the paper's.

    Raises:
        ConfigError: a bound is negative or NaN.
    """
    log_ratio, scale = _log_ratio(logp, old_logp, mask), masked(advantages, mask)
    mean = log_ratio.sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)
    # Where A < 0 the loss has no upper clip, so a single sequence with a huge ratio would dominate.
    ratio = (mean.detach() + log_ratio - log_ratio.detach()).clamp(max=10).exp()
    return torch.maximum(-ratio * scale, -_clipped(ratio, clip) * scale)


def cispo(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Mask,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Float[Tensor, "batch tokens"]:
    """-clip(r) A log pi with the clipped ratio as a constant: every token keeps a gradient.

    Args:
        logp: as of `ppo`.
        old_logp: as of `ppo`.
        advantages: as of `ppo`.
        mask: as of `ppo`.
        clip: low and high bounds of the ratio around 1; a low of 1 means no lower bound, as in the
            paper.

    Raises:
        ConfigError: a bound is negative or NaN.
    """
    weight = _clipped(_log_ratio(logp, old_logp, mask).exp(), clip).detach()
    return -weight * masked(advantages, mask) * masked(logp, mask)


def reinforce(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Mask,
) -> Float[Tensor, "batch tokens"]:
    """-A log pi; `old_logp` is ignored. Other arguments as in `ppo`."""
    return -masked(advantages, mask) * masked(logp, mask)


def value(
    values: Float[Tensor, "batch tokens"],
    old_values: Float[Tensor, "batch tokens"],
    returns: Float[Tensor, "batch tokens"],
    mask: Mask,
    clip: float | None = 0.2,
) -> Float[Tensor, "batch tokens"]:
    """max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2, of the critic.

    Args:
        values: v, by the critic that is trained.
        old_values: v_old, by the critic's weights when advantages were computed.
        returns: R.
        mask: of tokens that count.
        clip: distance of v from v_old beyond which v is clipped; None: no clipping.

    Raises:
        ConfigError: the clip is negative or NaN.
    """
    now, target = masked(values, mask), masked(returns, mask)
    error = (now - target).square()
    if clip is not None:
        if not clip >= 0:
            raise ConfigError(f"clip: expected a distance of 0 or more, or None, got {clip}")
        old = masked(old_values, mask)
        error = torch.maximum(error, (now.clamp(old - clip, old + clip) - target).square())
    return error / 2


@torch.no_grad()
def diagnostics(
    logp: Float[Tensor, "batch tokens"],
    old_logp: Float[Tensor, "batch tokens"],
    advantages: Float[Tensor, "batch tokens"],
    mask: Mask,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = 3.0,
) -> dict[str, Float[Tensor, ""]]:
    """Measures of how an update changed the policy, as sums additive over batches and ranks.

    Returns:
        The number of "tokens", of those "clipped" and of those "dual_clipped", which have no
        gradient; sums over tokens of "ratio" and of "k1" and "k3", estimates of KL(old || policy).
    """
    log_ratio, scale = _log_ratio(logp, old_logp, mask), masked(advantages, mask)
    ratio = log_ratio.exp()
    is_clipped = -_clipped(ratio, clip) * scale > -ratio * scale
    is_dual = (scale < 0) & (ratio > (float("inf") if dual_clip is None else dual_clip))
    sums = {
        "tokens": mask.bool().sum(),
        "clipped": is_clipped.sum(),
        "dual_clipped": is_dual.sum(),
        "ratio": masked(ratio, mask).sum(),
        "k1": -log_ratio.sum(),
        "k3": k3(old_logp, logp, mask).sum(),
    }
    return {name: total.to(logp.dtype) for name, total in sums.items()}


def _log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return masked(logp - old_logp, mask).clamp(-20, 20)


def _clipped(ratio: Tensor, clip: tuple[float, float]) -> Tensor:
    low, high = clip
    if not (low >= 0 and high >= 0):
        raise ConfigError(f"clip: expected a low and a high of 0 or more, got ({low}, {high})")
    return ratio.clamp(1 - low, 1 + high)
