"""Estimators of a policy's KL divergence from a reference, by log-probabilities of sampled tokens.

With x = log pi - log ref: k1 = x, k2 = x^2 / 2, k3 = e^-x + x - 1 (Schulman, "Approximating KL
Divergence", 2020). In expectation the values of k1 and k3 are the divergence, but only k2's
gradient is the divergence's; a "+" after a name combines its value with k2's gradient. The adaptive
coefficient is after "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from hybridflow.rl.aggregate import Mask, aggregate, masked
from shared.errors import ConfigError, DataError

__all__ = ["AdaptiveKL", "absolute", "estimate", "k1", "k2", "k3", "sequence_mean"]


def k1(
    logp: Float[Tensor, "batch tokens"],
    ref_logp: Float[Tensor, "batch tokens"],
    mask: Mask | None = None,
) -> Float[Tensor, "batch tokens"]:
    """x: unbiased, with high variance, negative for many tokens.

    Args:
        logp: log-probabilities of sampled tokens under the policy, in nats.
        ref_logp: the same under the reference.
        mask: of tokens that count; the result is 0 without gradient at others. None: all count.
    """
    x = logp - ref_logp
    return x if mask is None else masked(x, mask)


def absolute(
    logp: Float[Tensor, "batch tokens"],
    ref_logp: Float[Tensor, "batch tokens"],
    mask: Mask | None = None,
) -> Float[Tensor, "batch tokens"]:
    """|x|; arguments as of `k1`."""
    return k1(logp, ref_logp, mask).abs()


def k2(
    logp: Float[Tensor, "batch tokens"],
    ref_logp: Float[Tensor, "batch tokens"],
    mask: Mask | None = None,
) -> Float[Tensor, "batch tokens"]:
    """x^2 / 2: its value is biased, its gradient is not; arguments as of `k1`."""
    return k1(logp, ref_logp, mask).square() / 2


def k3(
    logp: Float[Tensor, "batch tokens"],
    ref_logp: Float[Tensor, "batch tokens"],
    mask: Mask | None = None,
) -> Float[Tensor, "batch tokens"]:
    """e^-x + x - 1 with x within +-20, at most 10; never negative; arguments as of `k1`."""
    x = k1(logp, ref_logp, mask).clamp(-20, 20)
    # expm1 keeps the digits that e^-x - 1 loses where the policies nearly agree.
    return (torch.expm1(-x) + x).clamp(max=10)


_KINDS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def estimate(
    logp: Float[Tensor, "batch tokens"],
    ref_logp: Float[Tensor, "batch tokens"],
    mask: Mask | None = None,
    *,
    kind: str = "k3",
) -> Float[Tensor, "batch tokens"]:
    """The estimate by name: "k1", "abs", "k2" or "k3", or one of them with "+" appended.

    Args:
        logp: as of `k1`.
        ref_logp: as of `k1`.
        mask: as of `k1`.
        kind: the name; "+" replaces the gradient by k2's.

    Raises:
        ConfigError: there is no such name.
    """
    base = kind.removesuffix("+")
    if base not in _KINDS:
        raise ConfigError(
            f"kl: expected one of {', '.join(_KINDS)}, with or without a + after it, got {kind!r}"
        )
    value = _KINDS[base](logp, ref_logp, mask)
    if base == kind:
        return value
    gradient = k2(logp, ref_logp, mask)
    return value.detach() + (gradient - gradient.detach())


def sequence_mean(kl: Float[Tensor, "batch tokens"], mask: Mask) -> Float[Tensor, ""]:
    """Mean over sequences of their tokens' means; the input of `AdaptiveKL.update`."""
    return aggregate(kl, mask, "seq-mean-token-mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveKL:
    """A KL coefficient that rises while the divergence is above a target, and falls below it.

    Attributes:
        beta: the coefficient.
        target: divergence to keep, in nats per token.
        horizon: sequences over which an error of 20 % or more changes beta by a fifth.

    Raises:
        ConfigError: a number is not positive and finite.
    """

    beta: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}: expected a positive finite number, got {value}")

    def update(self, kl: float | Float[Tensor, ""], num_sequences: int) -> AdaptiveKL:
        """The controller after a batch: beta * (1 + clip(kl / target - 1, +-0.2) * n / horizon).

        Args:
            kl: of the batch, as of `sequence_mean`.
            num_sequences: n, sequences of the batch.

        Raises:
            DataError: the divergence is NaN.
            ConfigError: beta would not stay positive, because the horizon is too short for the
                batch.
        """
        measured = float(kl)
        if math.isnan(measured):
            raise DataError("kl: expected a number, got nan; skip the update of such a batch")
        error = min(0.2, max(-0.2, measured / self.target - 1))
        return replace(self, beta=self.beta * (1 + error * num_sequences / self.horizon))

    def state_dict(self) -> dict[str, float]:
        """The state as numbers, by name."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float]) -> AdaptiveKL:
        """The controller whose `state_dict` this is.

        Raises:
            DataError: names are missing or too many.
        """
        names = [field.name for field in fields(cls)]
        if sorted(state) != sorted(names):
            raise DataError(f"adaptive KL: expected {', '.join(names)}, got {', '.join(state)}")
        return cls(**state)
