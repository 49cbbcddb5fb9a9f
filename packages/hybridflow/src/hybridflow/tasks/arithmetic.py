"""Sums, differences and products: after "12+7=" the response is "19" and the end token.

Responses differ in length; a right one ends where the answer does.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from typing import Any

from hybridflow.tasks.base import QuestionTask, match_each
from hybridflow.tasks.rewards import reward
from hybridflow.tasks.tokenizers import CharTokenizer
from shared.errors import ConfigError

__all__ = ["Arithmetic", "make"]

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_TOKENIZER = CharTokenizer("0123456789+-*=")


def _wanted(sample: dict[str, Any]) -> list[int]:
    return [*_TOKENIZER.encode(sample["answer"]), _TOKENIZER.end_token]


@reward
def score(sample: dict[str, Any], _: str) -> float:
    """1 for exactly the answer and the end token, else 0."""
    return float(sample["response_tokens"] == _wanted(sample))


@reward(per_token=True)
def token_rewards(sample: dict[str, Any], _: str) -> list[float]:
    """An equal part of 1 for each token of answer and end that is right at its place."""
    return match_each(sample["response_tokens"], _wanted(sample))


@dataclass(frozen=True, kw_only=True)
class Arithmetic(QuestionTask):
    """Two numbers and an operation; batches have the columns "question" and "answer", list[str].

    With fewer than 100 questions none is held out: they are evaluated as trained.

    Attributes:
        max_number: both numbers are drawn uniformly from 0 to this number.
        operations: some of `+ - *`, drawn uniformly.
        seed: of the training prompts.

    Raises:
        ConfigError: a number is negative, or an operation is not known or comes twice.
    """

    max_number: int
    operations: str = "+-"
    # Without annotations, these are no fields.
    tokenizer = _TOKENIZER
    score = score
    token_rewards = token_rewards

    def __post_init__(self) -> None:
        if self.max_number < 0:
            raise ConfigError(f"arithmetic.max_number: expected 0 or more, got {self.max_number}")
        given = set(self.operations)
        if not given or given - _OPERATIONS.keys() or len(given) < len(self.operations):
            raise ConfigError(
                f"arithmetic.operations: expected some of {''.join(_OPERATIONS)}, each once, got "
                f"{self.operations!r}"
            )

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the longest answer, and one for the end."""
        pairs = ((self.max_number, self.max_number), (0, self.max_number))
        return 1 + max(
            len(str(_OPERATIONS[sign](*pair))) for sign in self.operations for pair in pairs
        )

    @property
    def num_questions(self) -> int:
        """Number of different prompts."""
        return (self.max_number + 1) ** 2 * len(self.operations)

    def question(self, source: random.Random) -> str:
        """Two numbers and an operation."""
        a, b = source.randint(0, self.max_number), source.randint(0, self.max_number)
        return f"{a}{source.choice(self.operations)}{b}="

    def columns(self, prompt: str) -> dict[str, str]:
        """The question, and its answer in decimal."""
        sign = next(sign for sign in _OPERATIONS if sign in prompt)
        a, b = prompt[:-1].split(sign)
        return {"question": prompt[:-1], "answer": str(_OPERATIONS[sign](int(a), int(b)))}


def make(number: int, seed: int) -> Arithmetic:
    """The task "arithmetic:NUMBER" of a recipe."""
    return Arithmetic(max_number=number, seed=seed)
