"""A reward under a constraint on a cost, after "Safe RLHF" (arXiv 2310.12773).

The policy maximises reward - lambda * cost, and lambda rises while the expected cost is above its
limit. Dividing by 1 + lambda keeps the scale of advantages. The update is in the logarithm of
lambda, which keeps it positive: d ln lambda = alpha * lambda * J_C, with J_C = E[cost] + d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from jaxtyping import Float
from torch import Tensor

from shared.errors import ConfigError, DataError

__all__ = ["Multiplier", "combine"]


def combine(
    reward_advantages: Float[Tensor, "batch tokens"],
    cost_advantages: Float[Tensor, "batch tokens"],
    multiplier: float,
) -> Float[Tensor, "batch tokens"]:
    """(A_R - lambda * A_C) / (1 + lambda).

    Args:
        reward_advantages: A_R.
        cost_advantages: A_C, of the cost's own critic.
        multiplier: lambda.

    Raises:
        ConfigError: the multiplier is negative or not finite.
    """
    if not 0 <= multiplier < math.inf:
        raise ConfigError(f"multiplier: expected a finite number of 0 or more, got {multiplier}")
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiplier:
    """The Lagrange multiplier lambda and its update.

    Attributes:
        value: lambda.
        lr: alpha, the learning rate of ln lambda.
        offset: d; the constraint is E[cost] + d <= 0, so it is minus the limit of the cost.
        minimum: lower bound of lambda, which near 0 would hardly grow again.
        maximum: upper bound of lambda, whose growth is self-reinforcing; at 100 the reward's
            share is 1 in 101.

    Raises:
        ConfigError: a number is out of range.
    """

    value: float = 1.0
    lr: float = 0.1
    offset: float = 0.0
    minimum: float = 1e-3
    maximum: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.value <= self.maximum < math.inf:
            raise ConfigError(
                "multiplier: expected 0 < minimum <= value <= maximum, got minimum "
                f"{self.minimum}, value {self.value}, maximum {self.maximum}"
            )
        if not 0 <= self.lr < math.inf:
            raise ConfigError(f"lr: expected a finite number of 0 or more, got {self.lr}")
        if not math.isfinite(self.offset):
            raise ConfigError(f"offset: expected a finite number, got {self.offset}")

    def update(self, mean_cost: float | Float[Tensor, ""]) -> Multiplier:
        """The multiplier after a batch.

        Args:
            mean_cost: E[cost], the mean over all sequences of the global batch.

        Raises:
            DataError: the cost is not finite.
        """
        cost = float(mean_cost)
        if not math.isfinite(cost):
            raise DataError(f"mean_cost: expected a finite number, got {cost}; skip such a batch")
        log_value = math.log(self.value) + self.lr * self.value * (cost + self.offset)
        # Bounded before the exponential, which would overflow for a large cost, and after it,
        # because the logarithm of a bound is rounded.
        grown = math.exp(min(log_value, math.log(self.maximum)))
        return replace(self, value=max(self.minimum, min(grown, self.maximum)))

    def state_dict(self) -> dict[str, float]:
        """The state as numbers, by name."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float]) -> Multiplier:
        """The multiplier whose `state_dict` this is.

        Raises:
            DataError: names are missing or too many.
        """
        names = [field.name for field in fields(cls)]
        if sorted(state) != sorted(names):
            raise DataError(f"multiplier: expected {', '.join(names)}, got {', '.join(state)}")
        return cls(**state)
