"""Sorting digits: after "409>" the response is "049".

The length of the response is fixed, so that no end token is needed. A response with special tokens
among its digits is shorter as text, and so never exactly right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hybridflow.tasks.base import QuestionTask, match_each, match_fraction
from hybridflow.tasks.rewards import reward
from hybridflow.tasks.tokenizers import CharTokenizer
from shared.errors import ConfigError

__all__ = ["DigitSort", "make"]

_DIGITS = "0123456789"
_TOKENIZER = CharTokenizer(_DIGITS + ">")


def _sorted(sample: dict[str, Any]) -> str:
    return "".join(sorted(sample["digits"]))


@reward
def score(sample: dict[str, Any], text: str) -> float:
    """Share of positions that hold the right digit."""
    return match_fraction(text, _sorted(sample))


@reward(per_token=True)
def token_rewards(sample: dict[str, Any], _: str) -> list[float]:
    """1 / k for each right digit at its place."""
    return match_each(sample["response_tokens"], _TOKENIZER.encode(_sorted(sample)))


@dataclass(frozen=True, kw_only=True)
class DigitSort(QuestionTask):
    """Digits to sort; batches have the column "digits", list[str].

    With one digit there are ten prompts, too few to hold any out: they are evaluated as trained.

    Attributes:
        k: number of digits of a prompt.
        seed: of the training prompts.

    Raises:
        ConfigError: there is no digit to sort.
    """

    k: int = 3
    # Without annotations, these are no fields.
    tokenizer = _TOKENIZER
    score = score
    token_rewards = token_rewards

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"digit_sort.k: expected at least one digit, got {self.k}")

    @property
    def end_token(self) -> None:
        """None: every response has k tokens."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens of a response: k."""
        return self.k

    @property
    def num_questions(self) -> int:
        """Number of different prompts."""
        return 10**self.k

    def question(self, source: random.Random) -> str:
        """Digits and the separator."""
        return "".join(source.choices(_DIGITS, k=self.k)) + ">"

    def columns(self, prompt: str) -> dict[str, str]:
        """The digits, without the separator."""
        return {"digits": prompt[:-1]}


def make(number: int, seed: int) -> DigitSort:
    """The task "digit-sort:NUMBER" of a recipe."""
    return DigitSort(k=number, seed=seed)
