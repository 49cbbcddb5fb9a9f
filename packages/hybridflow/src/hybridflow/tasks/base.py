"""Interface and base class of tasks: sources of prompts, with a score for responses.

Every prompt is a pure function of seed, step and row. Questions are split by a hash of their text,
about one in ten held out, so that no seed ever trains on a prompt of the evaluation; fewer than 100
are not split, and are evaluated as trained.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridflow.tasks.prompts import END_TOKENS, prompt_batch
from hybridflow.tasks.rewards import Reward
from hybridflow.tasks.tokenizers import CharTokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError

__all__ = ["QuestionTask", "Task", "match_each", "match_fraction"]

# With fewer questions, a split by hash might leave one side empty.
_MIN_SPLIT = 100


@runtime_checkable
class Task(Protocol):
    """Prompts, and scores of responses to them."""

    tokenizer: CharTokenizer
    score: Reward
    token_rewards: Reward

    @property
    def end_token(self) -> int | None:
        """The token that ends a response; None if all responses have one length."""
        ...

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the longest right response, with its end token if it has one."""
        ...

    def batch(self, step: int, batch_size: int) -> Batch:
        """The prompts of a training step: a pure function of seed, step and row."""
        ...

    def batches(self, batch_size: int, steps: int, start: int = 0) -> Iterator[Batch]:
        """The prompts of some training steps, from `start` on."""
        ...

    def evaluation(self, num: int) -> Batch:
        """Always the same prompts, held out from training if there are enough to split."""
        ...

    def exact_match(self, roll: Batch) -> float:
        """Share of rows whose response is exactly right."""
        ...


@dataclass(frozen=True, kw_only=True)
class QuestionTask(Task, ABC):
    """Base of tasks that draw one of many questions for each row.

    Attributes:
        seed: of the training prompts.
    """

    seed: int = 0

    @property
    def end_token(self) -> int | None:
        """The tokenizer's end token."""
        return self.tokenizer.end_token

    @property
    @abstractmethod
    def num_questions(self) -> int:
        """Number of different prompts."""

    @abstractmethod
    def question(self, source: random.Random) -> str:
        """A prompt, drawn uniformly from all."""

    @abstractmethod
    def columns(self, prompt: str) -> dict[str, str]:
        """A prompt's object columns."""

    def batch(self, step: int, batch_size: int) -> Batch:
        """The prompts of a training step.

        Raises:
            ConfigError: the step is negative, or there is no row.
        """
        if step < 0 or batch_size < 1:
            raise ConfigError(
                f"batch: expected a step from 0 on and at least one row, got {step}, {batch_size}"
            )
        ids = range(step * batch_size, (step + 1) * batch_size)
        return self._batch(f"train/{self.seed}/{step}", ids, is_held_out=False)

    def batches(self, batch_size: int, steps: int, start: int = 0) -> Iterator[Batch]:
        """The prompts of some training steps, from `start` on."""
        return (self.batch(step, batch_size) for step in range(start, start + steps))

    def evaluation(self, num: int) -> Batch:
        """The same prompts for every seed, drawn from the held-out ones with repetition.

        Raises:
            ConfigError: there is no row.
        """
        if num < 1:
            raise ConfigError(f"evaluation: expected at least one row, got {num}")
        return self._batch("evaluation", range(num), is_held_out=True)

    def exact_match(self, roll: Batch) -> float:
        """Share of rows whose response is wholly right."""
        return float((self.score(roll, self.tokenizer)["scores"] == 1).float().mean())

    def _batch(self, key: str, ids: range, *, is_held_out: bool) -> Batch:
        prompts = [self._draw(f"{key}/{row}", is_held_out) for row in range(len(ids))]
        told = [self.columns(prompt) for prompt in prompts]
        tokens = [self.tokenizer.encode(prompt) for prompt in prompts]
        columns = {name: [row[name] for row in told] for name in told[0]}
        batch = prompt_batch(tokens, ids, **columns)
        if self.end_token is not None:
            batch.meta[END_TOKENS] = (self.end_token,)
        return batch

    def _draw(self, key: str, is_held_out: bool) -> str:
        source = random.Random(key)
        while True:
            prompt = self.question(source)
            is_fitting = (zlib.crc32(prompt.encode()) % 10 == 0) == is_held_out
            if is_fitting or self.num_questions < _MIN_SPLIT:
                return prompt


def match_fraction(text: str, wanted: str) -> float:
    """Number of right positions over the longer length; 1 if both texts are empty."""
    same = sum(a == b for a, b in zip(text, wanted, strict=False))
    return same / max(len(text), len(wanted)) if text or wanted else 1.0


def match_each(tokens: Sequence[int], wanted: Sequence[int]) -> list[float]:
    """1 / len(wanted) for each token that is right at its place, else 0."""
    return [
        float(k < len(wanted) and token == wanted[k]) / len(wanted)
        for k, token in enumerate(tokens)
    ]
