"""The next token of each row: greedy, or drawn by (seed, prompt, position), whatever the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.philox import philox, stream_key

__all__ = ["Sampling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the most probable token; else logits are divided by it.
        top_p: the least probable tokens whose probabilities add up to less than 1 - top_p are left
            out.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number in (0, 1], got {self.top_p}")

    def choose(
        self,
        logits: Float[Tensor, "rows vocabulary"],
        prompts: Int64[Tensor, " rows"],
        position: int,
    ) -> Int64[Tensor, " rows"]:
        """One token a row.

        Args:
            logits: float32.
            prompts: numbers of the rows' prompts, which with `position` decide the draw.
            position: of the new token, from 0.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        # The largest is 0 before it is divided: small temperatures would make it infinite.
        wide = logits.double()
        probabilities = ((wide - wide.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        sorted_p, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        before = sorted_p.cumsum(-1) - sorted_p
        kept = torch.where(before < self.top_p, sorted_p, 0.0)
        sums = kept.cumsum(-1)
        point = _uniform(prompts.cpu(), position, stream_key(self.seed)).to(logits.device)
        place = torch.searchsorted(sums, (point * sums[:, -1])[:, None], right=True)[:, 0]
        last = (kept > 0).sum(-1) - 1
        return tokens.gather(1, torch.minimum(place, last)[:, None])[:, 0]


def _uniform(prompts: Tensor, position: int, key: int) -> Float[Tensor, " rows"]:
    """A number in [0, 1) for each prompt at a position, of 53 bits."""
    low, high = prompts & 0xFFFFFFFF, prompts >> 32
    counter = torch.stack(
        [low, high, torch.full_like(low, position), torch.zeros_like(low)], dim=-1
    )
    words = philox(counter, key)
    return ((words[:, 0] >> 5) * 2.0**26 + (words[:, 1] >> 6)) * 2.0**-53
