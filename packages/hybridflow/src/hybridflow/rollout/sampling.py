"""Sampling of tokens: settings, and counter-based random numbers.

The random number that draws a token is a function of seed, step, sample and position, so that it is
the same on one rank and on many, whatever else is in the batch, and when a run is resumed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.philox import philox, stream_key

__all__ = ["EndTokens", "Sampling", "draw", "uniforms"]


class EndTokens(enum.Enum):
    """Where end tokens come from if a `Sampling` names none itself."""

    OF_MODEL = "those that the model's folder, or the prompts' tokenizer, names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the sampler.

    There is no truncation (top-k, top-p): the sampler's log-probabilities would then be of another
    distribution than the trainer's.

    Attributes:
        max_new_tokens: longest response, its end token included.
        num_samples: responses for each prompt.
        temperature: divides the logits; 0 takes the likeliest token.
        end_token: what ends a response besides max_new_tokens: the id of a token, or its text, or
            several of them; None: nothing does. Texts need a model from a folder with a tokenizer.
            By default the tokens that the model's generation_config.json (or else config.json), its
            tokenizer and the prompts' tokenizer name.
        seed: of the random numbers.

    Raises:
        ConfigError: no new token or no sample is asked for, the temperature is below 0, or an end
            token is neither an id from 0 on nor a text.
    """

    max_new_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    end_token: Any = EndTokens.OF_MODEL
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_samples < 1:
            raise ConfigError(
                f"sampling: expected at least one new token and one sample, got max_new_tokens "
                f"{self.max_new_tokens} and num_samples {self.num_samples}"
            )
        if self.temperature < 0:
            raise ConfigError(f"sampling.temperature: {self.temperature} is below 0 (greedy)")
        object.__setattr__(self, "end_token", _check_end_token(self.end_token))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of the end tokens, once `hybridflow.rollout.end_tokens` has resolved them."""
        assert self.end_token is not EndTokens.OF_MODEL, "generators resolve end tokens first"
        if self.end_token is None:
            return ()
        tokens = self.end_token if isinstance(self.end_token, tuple) else (self.end_token,)
        assert all(isinstance(token, int) for token in tokens), "generators resolve texts first"
        return tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def _check_end_token(given: Any) -> int | str | tuple[int | str, ...] | EndTokens | None:
    """The end tokens as plain ints and texts, a tuple of them if there may be several."""
    if given is None or isinstance(given, EndTokens):
        return given
    is_single = isinstance(given, str) or getattr(given, "ndim", None) == 0
    if is_single or not isinstance(given, Iterable) or isinstance(given, bytes | dict):
        return _check_token(given)
    tokens = tuple(_check_token(token) for token in given)
    if not tokens:
        raise ConfigError(
            "sampling.end_token: expected one token or more, got an empty list; give None for "
            "responses that only max_new_tokens ends"
        )
    return tuple(dict.fromkeys(tokens))


def _check_token(token: Any) -> int | str:
    if isinstance(token, str) and token:
        return token
    number = token.item() if getattr(token, "ndim", None) == 0 else token  # of numpy or torch
    if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
        return number
    raise ConfigError(
        f"sampling.end_token: expected the id of a token, from 0 on, or its text, or several of "
        f"them, got {token!r}; give for example tokenizer.end_token or eos_token_id"
    )


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
