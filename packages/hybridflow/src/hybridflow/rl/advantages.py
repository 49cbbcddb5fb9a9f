"""Estimators of advantages.

With a critic: GAE (arXiv 1506.02438). Relative to other responses to the prompt: GRPO (2402.03300),
Dr. GRPO (2503.20783), RLOO (2402.14740); to the greedy response: ReMax (2310.10505); to the batch:
REINFORCE++ (2501.03262). Masked tokens, such as a tool's inside a response, are skipped: results
are as if they were not there. All results are constants, without gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from hybridflow.rl.aggregate import Mask, masked
from shared.errors import ConfigError, DataError

__all__ = [
    "dr_grpo",
    "expand",
    "gae",
    "grpo",
    "moments",
    "reinforce_plus_plus",
    "remax",
    "reward_to_go",
    "rloo",
    "token_rewards",
    "whiten",
]


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "batch tokens"],
    values: Float[Tensor, "batch tokens"],
    mask: Mask,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t; next is unmasked.

    Args:
        rewards: of tokens.
        values: V, the critic's value before each token.
        mask: of tokens that count.
        gamma: discount of a token, in [0, 1].
        lam: lambda, in [0, 1]; 1 uses rewards only, 0 relies on the critic most.

    Returns:
        Advantages, not whitened, and returns A + V; both 0 where masked.

    Raises:
        ConfigError: gamma or lam is out of range.
    """
    _check_share(gamma=gamma, lam=lam)
    own = masked(values, mask)
    # The value at the nearest token that counts, at t or later; that of t + 1 is V_next.
    nearest = _scan(own, _decay(mask, 0.0, own.dtype))
    following = torch.nn.functional.pad(nearest[:, 1:], (0, 1))
    delta = masked(masked(rewards, mask) + gamma * following - own, mask)
    advantages = masked(_scan(delta, _decay(mask, gamma * lam, delta.dtype)), mask)
    return advantages, advantages + own


def grpo(
    scores: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    *,
    is_dropped: Bool[Tensor, " batch"] | None = None,
    normalize_std: bool = True,
) -> Float[Tensor, " batch"]:
    """(s - mean) / (std + 1e-6) within each group, std unbiased; a group of equals has exactly 0.

    Args:
        scores: of responses.
        group: ids of the responses' prompts: any integers, in any order.
        is_dropped: responses that have no score. They are ignored and get advantage 0, as does a
            response that is the only one left in its group.
        normalize_std: whether to divide by the standard deviation.

    Raises:
        ConfigError: a group has one response only, dropped ones included.
        DataError: a score is not finite.
    """
    centered, index, counts = _centered(scores, group, is_dropped)
    if not normalize_std:
        return centered
    squares = torch.zeros_like(counts).index_add_(0, index, centered.square())
    return centered / ((squares / (counts - 1).clamp(min=1)).sqrt()[index] + 1e-6)


def dr_grpo(
    scores: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    *,
    is_dropped: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """(s - mean) within each group; arguments and errors as of `grpo`."""
    return grpo(scores, group, is_dropped=is_dropped, normalize_std=False)


def rloo(
    scores: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    *,
    is_dropped: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """n / (n - 1) * (s - mean) within each group, which is s less the mean of the others.

    Arguments and errors as of `grpo`.
    """
    centered, index, counts = _centered(scores, group, is_dropped)
    return centered * (counts / (counts - 1).clamp(min=1))[index]


@torch.no_grad()
def remax(
    rewards: Float[Tensor, "batch tokens"], mask: Mask, greedy_scores: Float[Tensor, " batch"]
) -> Float[Tensor, "batch tokens"]:
    """Sum of rewards from a token on, minus the score of the greedy response to the prompt.

    Raises:
        DataError: a greedy score is not finite.
    """
    _check_scores(greedy_scores)
    return masked(reward_to_go(rewards, mask) - greedy_scores[:, None], mask)


def reinforce_plus_plus(
    rewards: Float[Tensor, "batch tokens"], mask: Mask, gamma: float
) -> Float[Tensor, "batch tokens"]:
    """Discounted rewards from a token on, whitened over the batch.

    If the batch is spread over ranks, whiten `reward_to_go` by the moments of all ranks instead.

    Raises:
        ConfigError: gamma is out of range.
    """
    return whiten(reward_to_go(rewards, mask, gamma), mask)


@torch.no_grad()
def reward_to_go(
    rewards: Float[Tensor, "batch tokens"], mask: Mask, gamma: float = 1.0
) -> Float[Tensor, "batch tokens"]:
    """Rewards from a token on, discounted by gamma per token that counts; 0 where masked.

    Raises:
        ConfigError: gamma is out of range.
    """
    _check_share(gamma=gamma)
    own = masked(rewards, mask)
    return masked(_scan(own, _decay(mask, gamma, own.dtype)), mask)


@torch.no_grad()
def moments(values: Float[Tensor, "batch tokens"], mask: Mask) -> Float64[Tensor, " 3"]:
    """Sum, sum of squares and number of unmasked values; additive, so ranks can all-reduce them."""
    own = masked(values, mask).double()
    return torch.stack([own.sum(), own.square().sum(), mask.bool().sum().double()])


@torch.no_grad()
def whiten(
    values: Float[Tensor, "batch tokens"],
    mask: Mask,
    *,
    shift_mean: bool = True,
    global_moments: Float64[Tensor, " 3"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    """(v - mean) / sqrt(var + 1e-8), with the unbiased variance of unmasked values.

    Args:
        values: v, of tokens.
        mask: of tokens that count.
        shift_mean: whether the mean becomes 0; otherwise it is kept.
        global_moments: `moments` summed over ranks, if `values` is one rank's part of the batch.

    Returns:
        Whitened values, 0 where masked; the values unchanged if fewer than two count.
    """
    total, squares, count = (
        moments(values, mask) if global_moments is None else global_moments
    ).tolist()
    if count < 2:
        return values
    mean = total / count
    variance = max(0.0, (squares - total * mean) / (count - 1))
    whitened = (values - mean) * (variance + 1e-8) ** -0.5
    return masked(whitened if shift_mean else whitened + mean, mask)


@torch.no_grad()
def token_rewards(
    scores: Float[Tensor, " batch"],
    mask: Mask,
    kl: Float[Tensor, "batch tokens"] | None = None,
    beta: float = 0.0,
) -> Float[Tensor, "batch tokens"]:
    """A response's score at its last unmasked token, minus beta * kl at each.

    Args:
        scores: of responses; ignored for a response without unmasked tokens.
        mask: of tokens that count.
        kl: estimates of the divergence from the reference.
        beta: penalty per nat.

    Raises:
        ConfigError: `beta` is not 0, and `kl` is missing.
        DataError: a score is not finite.
    """
    _check_scores(scores)
    if kl is None and beta:
        raise ConfigError(f"beta: {beta} needs kl=, the divergence of each token, or set it to 0")
    counts = mask.bool()
    is_last = counts & (counts.flip(1).cumsum(1).flip(1) == 1)
    rewards = expand(scores, is_last)
    return rewards if kl is None else rewards - beta * masked(kl, mask)


@torch.no_grad()
def expand(values: Float[Tensor, " batch"], mask: Mask) -> Float[Tensor, "batch tokens"]:
    """Copies a response's value to each of its unmasked tokens; 0 elsewhere."""
    return masked(values[:, None].expand(mask.shape), mask)


def _scan(x: Tensor, factor: Tensor) -> Tensor:
    """y_t = x_t + factor_t y_{t+1}, from the last token back; one operation per token."""
    y, found = x.new_zeros(len(x)), []
    for here, decay in zip(reversed(x.unbind(1)), reversed(factor.unbind(1)), strict=True):
        y = torch.addcmul(here, decay, y)
        found.append(y)
    return torch.stack(found[::-1], 1) if found else x


def _decay(mask: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """The factor at tokens that count; 1 at masked ones, which are skipped."""
    return torch.ones_like(mask, dtype=dtype).masked_fill(mask.bool(), factor)


@torch.no_grad()
def _centered(
    scores: Tensor, group: Tensor, is_dropped: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their groups' means, each response's group index, and the groups' sizes.

    Dropped responses have 0, and are not counted.
    """
    is_kept = torch.ones_like(group, dtype=torch.bool) if is_dropped is None else ~is_dropped
    scores = torch.where(is_kept, scores, 0)
    _check_scores(scores)
    ids, index, sizes = group.unique(return_inverse=True, return_counts=True)
    if (sizes == 1).any():
        raise ConfigError(
            f"group {int(ids[sizes == 1][0])}: expected two responses or more to compare, got one; "
            "sample n >= 2 responses per prompt, or use gae, remax or reinforce_plus_plus"
        )
    zeros = scores.new_zeros(len(ids))
    counts = zeros.index_add(0, index, is_kept.to(scores.dtype))
    # Shifted by the minimum: the rounded mean of n equal numbers may differ from them, of 0s not.
    least = zeros.scatter_reduce(0, index[is_kept], scores[is_kept], "amin", include_self=False)
    raised = torch.where(is_kept, scores - least[index], 0)
    mean = zeros.index_add(0, index, raised) / counts.clamp(min=1)
    return torch.where(is_kept, raised - mean[index], 0), index, counts


def _check_scores(scores: Tensor) -> None:
    is_bad = ~scores.isfinite()
    if is_bad.any():
        row = int(is_bad.nonzero()[0])
        raise DataError(
            f"scores: expected finite numbers, got {float(scores[row])} in row {row}; "
            "drop the sample or fix its reward"
        )


def _check_share(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}: expected a number in [0, 1], got {share}")
