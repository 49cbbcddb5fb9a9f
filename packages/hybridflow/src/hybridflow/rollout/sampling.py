"""Sampling of tokens: settings, and counter-based random numbers.

The random number that draws a token is a function of seed, step, sample and position, so that it is
the same on one rank and on many, whatever else is in the batch, and when a run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.philox import philox, stream_key

__all__ = ["Sampling", "draw", "uniforms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the sampler.

    There is no truncation (top-k, top-p): the sampler's log-probabilities would then be of another
    distribution than the trainer's.

    Attributes:
        max_new_tokens: longest response, its end token included.
        num_samples: responses for each prompt.
        temperature: divides the logits; 0 takes the likeliest token.
        end_token: token that ends a response; None: only max_new_tokens does.
        seed: of the random numbers.

    Raises:
        ConfigError: no new token or no sample is asked for, or the temperature is below 0.
    """

    max_new_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    end_token: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_samples < 1:
            raise ConfigError(
                f"sampling: expected at least one new token and one sample, got max_new_tokens "
                f"{self.max_new_tokens} and num_samples {self.num_samples}"
            )
        if self.temperature < 0:
            raise ConfigError(f"sampling.temperature: {self.temperature} is below 0 (greedy)")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def uniforms(
    seed: int, step: int, samples: Int64[Tensor, " samples"], num_positions: int
) -> Float[Tensor, "samples positions"]:
    """Random numbers in [0, 1), float64: one for each sample's id and position of its response."""
    ids = samples.to(torch.int64)[:, None].expand(-1, num_positions)
    positions = torch.arange(num_positions, device=samples.device).expand(len(samples), -1)
    zeros = torch.zeros_like(ids)
    counter = torch.stack([positions, ids & 0xFFFFFFFF, (ids >> 32) & 0xFFFFFFFF, zeros], -1)
    words = philox(counter, stream_key(seed, step))
    return ((words[..., 0] << 21) + (words[..., 1] >> 11)).double() / 2**53


def draw(
    logits: Float[Tensor, "rows vocabulary"], numbers: Float[Tensor, " rows"] | None
) -> tuple[Int64[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Draws a token for each row; returns tokens and their log-probabilities.

    Args:
        logits: divided by the temperature already.
        numbers: in [0, 1), inverted through the cumulative distribution; None takes the likeliest
            token.
    """
    log_p = torch.log_softmax(logits, -1)
    if numbers is None:
        tokens = logits.argmax(-1)
    else:
        total = log_p.exp().cumsum(-1, dtype=torch.float64)
        # Scaled by the last sum, which differs from one by rounding.
        tokens = torch.searchsorted(total, (numbers * total[:, -1])[:, None], right=True)[:, 0]
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens, log_p.gather(1, tokens[:, None])[:, 0]
