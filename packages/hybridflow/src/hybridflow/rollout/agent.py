"""Multi-turn conversations of a policy with tools, as rows to train on.

All conversations of a batch run in lockstep; each turn is one call of the generator. Tools' answers
are part of the row but masked from training, with log-probability 0 and version -1. A turn begins
only if a turn of full length fits, so that a conversation's length does not depend on the others.
Each turn has its own seed, derived from the sampling's seed and the turn's index; within a turn,
random numbers depend on step, sample and position as in `hybridflow.rollout.sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridflow.rollout.end_tokens import resolve_end_tokens
from hybridflow.rollout.native.generator import Responses
from hybridflow.rollout.rows import ServedResponses
from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.tools import Tool, ToolAnswer, ToolCall, parse_calls, run_calls
from hybridflow.tasks.prompts import END_TOKENS
from hybridflow.tasks.tokenizers import Tokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key

__all__ = ["AgentLoop", "Generate", "write_answers"]


@runtime_checkable
class Generate(Protocol):
    """A generator, such as `functools.partial(native.generate, model)` or a server's."""

    def __call__(
        self, prompts: Sequence[Tensor], sampling: Sampling, *, sample_ids: Tensor, step: int
    ) -> Responses:
        """Generates responses to prompts."""
        ...


def write_answers(answers: Sequence[str]) -> str:
    """Formats answers, in the order of their calls, as <result>...</result> each."""
    return "".join(f"<result>{answer}</result>" for answer in answers)


@dataclass(slots=True)
class _Conversation:
    sample: int
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    num_turns: int = 0
    num_errors: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    answers: list[ToolAnswer] = field(default_factory=list)
    is_over: bool = False

    def add(
        self, tokens: Sequence[int], log_probs: Sequence[float], *, version: int, is_made: bool
    ) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.mask += [is_made] * len(tokens)
        self.versions += [version] * len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoop:
    """A loop in which a policy generates turns, calls tools, and reads their answers.

    A conversation ends after a turn without a call, a turn cut off by its length, `max_turns`
    turns, or when another turn does not fit; its last token is always the policy's.

    Attributes:
        generate: the policy's generator.
        tokenizer: decodes the policy's turns and encodes answers.
        tools: functions from keyword arguments to text, by name.
        max_turns: most turns of the policy in a conversation.
        max_tokens: most tokens of a conversation after its prompt, answers included.
        tool_timeout_s: time limit of each call, in seconds.
        max_answer_tokens: most tokens kept of the answers to one turn.
        parse: finds the calls in a turn's text; the policy reads the message of a ValueError.
        write: formats the answers to a turn as text.
        encode: tokenizes that text; set it if the tokenizer's `encode` prepends a start token.
    """

    generate: Generate
    tokenizer: Tokenizer
    tools: Mapping[str, Tool]
    max_turns: int
    max_tokens: int
    tool_timeout_s: float = 10.0
    max_answer_tokens: int | None = None
    parse: Callable[[str], Sequence[ToolCall]] = parse_calls
    write: Callable[[Sequence[str]], str] = write_answers
    encode: Callable[[str], list[int]] | None = None

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.tool_timeout_s <= 0:
            raise ConfigError(
                f"expected at least one turn and a time limit above 0, got max_turns "
                f"{self.max_turns} and tool_timeout_s {self.tool_timeout_s}"
            )

    def run(self, batch: Batch, sampling: Sampling, *, step: int = 0, version: int = 0) -> Batch:
        """Runs the conversations of a batch.

        Args:
            batch: columns prompts [B, P], prompt_lengths [B], sample_ids [B]; others are kept.
            sampling: of each turn; its end tokens and max_new_tokens end a turn. If it names none,
                the tokenizer's end token does.
            step: training step; random numbers differ between steps.
            version: of the weights, used if the generator does not return versions.

        Returns:
            B x num_samples rows, those of a prompt adjacent: the prompts' columns and tokens
            [., P + max_tokens], lengths, mask of the policy's tokens, rollout_log_probs, versions
            (-1 for tools' tokens), group, num_turns, and tool_errors, the number of calls that
            returned an error.

        Raises:
            ConfigError: if there is no end token, or not even one turn fits into max_tokens.
            DataError: if the batch has no rows.
        """
        named = (self.tokenizer.end_token, *batch.meta.get(END_TOKENS, ()))
        sampling = resolve_end_tokens(sampling, named, token_of=self._token_of)
        if sampling.end_token is None or sampling.max_new_tokens > self.max_tokens:
            raise ConfigError(
                f"expected an end token and turns that fit into max_tokens {self.max_tokens}, got "
                f"sampling.end_token {sampling.end_token} and max_new_tokens "
                f"{sampling.max_new_tokens}"
            )
        if not len(batch):
            raise DataError("expected at least one prompt, got a batch of no rows")
        n = sampling.num_samples
        rows = batch.repeat(n)
        ids = rows["sample_ids"] * n + torch.arange(n).repeat(len(batch))
        talks = [
            _Conversation(sample, row[:length].tolist(), [False] * length, [0.0] * length,
                          [-1] * length)
            for sample, row, length in zip(
                ids.tolist(), rows["prompts"], rows["prompt_lengths"].tolist(), strict=True
            )
        ]  # fmt: skip
        dtype = torch.float32
        for turn in range(self.max_turns):
            active = [talk for talk in talks if not talk.is_over]
            if not active:
                break
            # The first turn keeps the seed, so that it equals a generation without tools.
            seed = stream_key(sampling.seed, turn) if turn else sampling.seed
            asked = replace(sampling, num_samples=1, seed=seed)
            dtype = self._turn(active, asked, step, version)
            self._answer([talk for talk in active if talk.calls or talk.answers])
            for talk, start in zip(talks, rows["prompt_lengths"].tolist(), strict=True):
                self._read(talk, start + self.max_tokens - sampling.max_new_tokens)
        return rows | self._table(talks, rows, dtype)

    def _token_of(self, text: str) -> int:
        ids = (self.encode or self.tokenizer.encode)(text)
        if len(ids) != 1:
            raise ConfigError(
                f"sampling.end_token: expected a text of one token, got {text!r}, which is "
                f"{len(ids)}; give one token, or its id"
            )
        return ids[0]

    def _turn(
        self, active: list[_Conversation], sampling: Sampling, step: int, version: int
    ) -> torch.dtype:
        """Generates a turn and parses its calls; returns the dtype of the log-probabilities."""
        found = self.generate(
            [torch.tensor(talk.tokens) for talk in active],
            sampling,
            sample_ids=torch.tensor([talk.sample for talk in active]),
            step=step,
        )
        versions = [version] * len(active)
        if isinstance(found, ServedResponses):
            versions = found.versions.tolist()
        tokens, worth = found.tokens.cpu(), found.log_probs.cpu()
        for k, talk in enumerate(active):
            made = slice(int(found.prompt_lengths[k]), int(found.lengths[k]))
            response = tokens[k, made].tolist()
            talk.add(response, worth[k, made].tolist(), version=versions[k], is_made=True)
            talk.num_turns += 1
            talk.calls, talk.answers = [], []
            is_last = talk.num_turns == self.max_turns or response[-1] not in sampling.end_tokens
            if not is_last:
                try:
                    talk.calls = list(self.parse(self.tokenizer.decode(response)))
                except ValueError as error:
                    talk.answers = [ToolAnswer(f"the call can not be read: {error}", is_error=True)]
            talk.is_over = not talk.calls and not talk.answers
        return worth.dtype

    def _answer(self, calling: list[_Conversation]) -> None:
        """Runs the calls of all conversations together."""
        calls = [call for talk in calling for call in talk.calls]
        answers = iter(run_calls(calls, self.tools, timeout_s=self.tool_timeout_s))
        for talk in calling:
            talk.answers += [next(answers) for _ in talk.calls]
            talk.num_errors += sum(answer.is_error for answer in talk.answers)

    def _read(self, talk: _Conversation, limit: int) -> None:
        """Appends answers to a conversation if another turn still fits after them."""
        if talk.is_over:
            return
        text = self.write([answer.text for answer in talk.answers])
        tokens = (self.encode or self.tokenizer.encode)(text)[: self.max_answer_tokens]
        talk.is_over = len(talk.tokens) + len(tokens) > limit
        if not talk.is_over:
            talk.add(tokens, [0.0] * len(tokens), version=-1, is_made=False)

    def _table(self, talks: list[_Conversation], rows: Batch, log_probs: torch.dtype) -> Batch:
        width = rows["prompts"].shape[1] + self.max_tokens

        def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
            found = torch.full((len(talks), width), fill, dtype=dtype)
            for row, talk in zip(found, talks, strict=True):
                values = getattr(talk, name)
                row[: len(values)] = torch.tensor(values, dtype=dtype)
            return found

        return Batch(
            tokens=column("tokens", 0, torch.int64),
            lengths=torch.tensor([len(talk.tokens) for talk in talks]),
            mask=column("mask", 0, torch.bool),
            rollout_log_probs=column("log_probs", 0.0, log_probs),
            versions=column("versions", -1, torch.int32),
            group=rows["sample_ids"],
            num_turns=torch.tensor([talk.num_turns for talk in talks]),
            tool_errors=torch.tensor([talk.num_errors for talk in talks]),
        )
