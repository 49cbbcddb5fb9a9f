"""Generates with a plan's stages, each on its rank, micro-batches passing round the ring at once.

The first stage embeds tokens and chooses the next ones; hidden states pass from stage to stage, and
from the last one back to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import LogitsProcessorList

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from llmpq.runtime.generation import GenerationRules, read_rules
from llmpq.runtime.layers import most_positions
from llmpq.runtime.loader import check_plan, check_weights, load_stage
from llmpq.runtime.messages import (
    DECODE,
    END,
    PHASES,
    PREFILL,
    Progress,
    StageLinks,
    StageMessage,
    all_through,
)
from llmpq.runtime.sampling import Sampling
from llmpq.runtime.stage import Batch, StageSeconds, StageWorker
from shared.comms import Group, Round, post_rounds
from shared.errors import CommError, ConfigError, DataError

__all__ = ["Pipeline"]


class Pipeline:
    """A plan's stages, loaded on their ranks, as a context manager.

    Every rank of the world makes one and makes the same calls; ranks without a stage do nothing.
    """

    def __init__(
        self, plan: Plan, folder: str | Path, *, device: str | torch.device | None = None
    ) -> None:
        """Checks the plan; weights are read on entry.

        Args:
            plan: stages name ranks of the initialised process group.
            folder: a Hugging Face model with safetensors.
            device: of this rank's layers; by default the one that the group's messages lie on, the
                rank's GPU with NCCL and the CPU with gloo. On another one, messages are copied.

        Raises:
            ConfigError: the plan is of another model, or names a rank that there is not; or the model is
                stored in a form that is not read.
            DataError: a tensor of the model is missing, or is not what its configuration says.
        """
        check_plan(plan, folder)
        self._plan, self._folder = plan, Path(folder)
        self._shape = ModelSpec.from_hf(folder)
        self._group = Group.world()
        self._device = torch.device(self._group.device if device is None else device)
        self._most_positions = most_positions(folder)
        ranks = [stage.rank for stage in plan.stages]
        if max(ranks) >= self._group.world_size:
            raise ConfigError(
                f"expected at least {max(ranks) + 1} ranks, as a stage is on rank {max(ranks)}, "
                f"got {self._group.world_size}; start more, or plan for fewer devices"
            )
        self._ranks = ranks
        me = self._group.rank
        self._number = ranks.index(me) if me in ranks else None
        self._rules = GenerationRules()
        if self._number is not None:
            check_weights(folder)
        if self._number == 0:
            self._rules = read_rules(folder)
        self._stage: StageWorker | None = None
        self.read_bytes = 0
        self._links: StageLinks | None = None
        self._way_home: Group | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Pipeline:
        with all_through(self._group, "load its stage"):
            if self._number is not None:
                model, self.read_bytes = load_stage(self._folder, self._plan, self._number)
                self._stage = StageWorker(model, self._plan, self._shape, self._device)
        # Every rank of the world takes part in making groups, members or not.
        self._links = StageLinks(self._group, self._ranks, self._number, self._plan, self._shape)
        if self._ranks[0]:
            self._way_home = Group.of([0, self._ranks[0]])
            self._progress = Progress(self._group, self._ranks[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stage = self._links = None

    @property
    def plan(self) -> Plan:
        """What it runs."""
        return self._plan

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._folder

    @property
    def stage_s(self) -> StageSeconds:
        """Measured seconds of this rank's work in the last `generate`; none without a stage."""
        return StageSeconds() if self._stage is None else self._stage.seconds

    def generate(
        self,
        input_ids: Int64[Tensor, "prompts tokens"],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        prompt_numbers: Int64[Tensor, " prompts"] | None = None,
    ) -> Int64[Tensor, "prompts new_tokens"] | None:
        """Generates for a batch of prompts; every rank calls it with the same arguments.

        Rules of the model's generation config that change the most probable token, like
        `repetition_penalty`, apply to each prompt as in transformers' `generate`.

        Args:
            input_ids: the prompts, padded on either side.
            attention_mask: 1 for tokens that count; all do without one.
            max_new_tokens: most tokens a prompt gets.
            eos_token_id: ends a prompt's answer, of which it is the last token; or several that do.
            pad_token_id: stands behind an answer that has ended.
            temperature: 0 takes the most probable token; else logits are divided by it.
            top_p: in (0, 1]; the least probable tokens that add up to less than 1 - top_p are left out.
            seed: of draws; with a prompt's number and position it decides them under any plan.
            prompt_numbers: numbers of the prompts for the draws, by default from 0.

        Returns:
            The new tokens, on rank 0; None elsewhere.

        Raises:
            ConfigError: the pipeline was not entered, no new token is asked for, or prompt and answer
                are longer than the model has positions for.
            DataError: shapes do not fit, a prompt is empty, or has a token that the model lacks.
            CommError: another stage died or stands still; names its rank.
        """
        if self._links is None:
            raise ConfigError(
                "expected an entered pipeline; call generate inside `with Pipeline(...)`"
            )
        ids, mask = _pad_left(input_ids, attention_mask, pad_token_id)
        highest = int(torch.where(mask == 1, ids, 0).max())
        if highest >= self._shape.vocab_size or int(ids.min()) < 0:
            raise DataError(
                f"input_ids: expected tokens from 0 to {self._shape.vocab_size - 1}, which the model "
                f"{self._folder} has, got {highest if int(ids.min()) >= 0 else int(ids.min())}"
            )
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        length = mask.shape[1] + max_new_tokens
        if self._most_positions is not None and length > self._most_positions:
            raise ConfigError(
                f"{self._folder}: expected at most {self._most_positions} tokens of prompt and answer, "
                f"for which the model has positions, got {mask.shape[1]} + {max_new_tokens}"
            )
        batch = Batch(mask, max_new_tokens, self._plan.prefill_size, self._plan.decode_size)
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        numbers = torch.arange(len(ids)) if prompt_numbers is None else prompt_numbers
        ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        head = _Head(batch, sampling, numbers, ends, pad_token_id)
        if self._rules:
            head.follow(self._rules, ids)
        if self._progress is not None:
            self._progress.begin()
        found = self._work(batch, ids, head)
        return self._bring_home(found, batch)

    def _work(self, batch: Batch, ids: Tensor, head: _Head) -> Tensor | None:
        """This rank's stage on the batch; the tokens on the first one."""
        if self._stage is None:
            return None
        assert self._links is not None, "the pipeline was entered"
        progress = self._progress if self._number == 0 else None
        found, is_done = None, False
        self._stage.begin(batch)
        self._links.begin()
        try:
            if self._number == 0:
                step = progress.step if progress is not None else lambda: None
                found = _lead(self._stage, self._links, batch, ids, head, step)
            else:
                _follow(self._stage, self._links, batch)
            self._links.flush()
            is_done = True
        except CommError:
            raise
        except BaseException:
            self._links.fail()
            raise
        finally:
            self._stage.end()
            if progress is not None:
                progress.end(has_failed=not is_done)
        return found

    def _bring_home(self, found: Tensor | None, batch: Batch) -> Tensor | None:
        """Sends the tokens from the first stage's rank to rank 0."""
        first, me, pair = self._ranks[0], self._group.rank, self._way_home
        if pair is None or me not in (0, first):
            return found if me == 0 else None
        if me == 0 and self._stage is None:
            assert self._progress is not None, "made with the pair"
            self._progress.wait()
        shape = len(batch.mask), batch.max_new_tokens + 1
        tokens = torch.empty(shape, dtype=torch.int64, device=self._group.device)
        if me == first:
            assert found is not None, "the first stage has chosen them"
            tokens[:, : found.shape[1]] = found
            tokens[:, -1] = found.shape[1]
        other = 0 if me == first else first
        at = pair.ranks.index(other)
        item = Round(
            send_to=at, send=tokens if me == first else None,
            recv_from=at, recv=None if me == first else tokens,
        )  # fmt: skip
        post_rounds(pair, [item], "answers").wait_all()
        return tokens[:, : int(tokens[0, -1])] if me == 0 else None


def _pad_left(ids: Tensor, mask: Tensor | None, pad: int) -> tuple[Tensor, Tensor]:
    """Prompts with their padding on the left, and the mask of their tokens."""
    mask = torch.ones_like(ids) if mask is None else mask.to(torch.int64)
    if ids.ndim != 2 or mask.shape != ids.shape or not len(ids):
        raise DataError(
            f"expected token ids [prompts, tokens] and a mask of that shape, got {list(ids.shape)} "
            f"and {list(mask.shape)}"
        )
    empty = (mask.sum(1) == 0).nonzero()[:, 0]
    if len(empty):
        raise DataError(f"expected a token in each prompt, got none in prompt {int(empty[0])}")
    order = mask.argsort(dim=1, stable=True)  # those that count keep their order, at the end
    mask = mask.gather(1, order)
    return torch.where(mask == 1, ids.gather(1, order), pad), mask


class _Head:
    """Chooses tokens and keeps what has been said."""

    def __init__(
        self, batch: Batch, sampling: Sampling, numbers: Tensor, ends: list[int], pad: int
    ) -> None:
        self._batch, self._sampling, self._numbers = batch, sampling, numbers
        self._ends, self._pad = torch.tensor(ends, dtype=torch.int64), pad
        num_prompts = len(batch.mask)
        self.tokens = torch.full((num_prompts, batch.max_new_tokens), pad)
        self._has_ended = torch.zeros(num_prompts, dtype=torch.bool)
        self._num_said = torch.zeros(batch.num_decode, dtype=torch.int64)
        self._prompts: list[Tensor] = []
        self._processors: list[LogitsProcessorList] = []

    def follow(self, rules: GenerationRules, ids: Tensor) -> None:
        """Applies rules to each prompt from now on.

        Args:
            rules: of the model's generation config.
            ids: the prompts, padded on the left.
        """
        mask = self._batch.mask
        self._prompts = [row[keep == 1] for row, keep in zip(ids, mask, strict=True)]
        ends = self._ends.tolist()
        self._processors = rules.start(self._prompts, self._batch.max_new_tokens, ends)

    def take(self, number: int, low: int, high: int, logits: Tensor) -> None:
        """Chooses tokens for rows of a decode micro-batch."""
        first = self._batch.rows(number)[0]
        rows = slice(first + low, first + high)
        position = int(self._num_said[number])
        if self._processors:
            parts = zip(range(first + low, first + high), logits.cpu().split(1), strict=True)
            logits = torch.cat([self._follow_rules(row, position, part) for row, part in parts])
        tokens = self._sampling.choose(logits, self._numbers[rows], position).cpu()
        tokens = torch.where(self._has_ended[rows], self._pad, tokens)
        self.tokens[rows, position] = tokens
        self._has_ended[rows] |= torch.isin(tokens, self._ends)

    def _follow_rules(self, row: int, position: int, logits: Any) -> Tensor:
        """Logits [1, vocabulary] of a prompt as its rules leave them."""
        said: Any = torch.cat([self._prompts[row], self.tokens[row, :position]])
        return self._processors[row](said[None], logits)

    def advance(self, number: int) -> Tensor | None:
        """The tokens to go on with [rows, 1]; None where a micro-batch has ended."""
        rows = slice(*self._batch.rows(number))
        position = int(self._num_said[number])
        self._num_said[number] += 1
        if position + 1 == self._batch.max_new_tokens or bool(self._has_ended[rows].all()):
            return None
        return self.tokens[rows, position : position + 1]

    def answers(self) -> Tensor:
        """All that was said."""
        return self.tokens[:, : int(self._num_said.max())]


def _lead(
    stage: StageWorker,
    links: StageLinks,
    batch: Batch,
    ids: Tensor,
    head: _Head,
    on_return: Callable[[], None],
) -> Tensor:
    """The first stage's part of a call: all prefills, then every micro-batch as it returns."""
    prefills = deque(
        (number, low, high) for number in range(batch.num_decode)
        for low, high in batch.chunks(number)
    )  # fmt: skip
    num_waiting = [len(batch.chunks(number)) for number in range(batch.num_decode)]
    # A slow stage keeps no more prompts waiting than these, whatever the first one could send.
    num_prefills, most_prefills = 0, links.num_stages + 2
    num_away = 0
    while prefills or num_away:
        is_full = not prefills or num_prefills >= most_prefills
        returned = links.receive(wait=is_full) if num_away else None
        if returned is None:
            number, low, high = prefills.popleft()
            first = batch.rows(number)[0]
            hidden = stage.prefill(number, low, high, ids[first + low : first + high])
            links.send(StageMessage(PREFILL, number, low, high, hidden))
            num_prefills += 1
            num_away += 1
            continue
        num_away -= 1
        on_return()
        number = returned.number
        assert returned.hidden is not None
        with stage.timed(f"head_{PHASES[returned.kind]}"):
            logits = stage.model.logits(returned.hidden[:, -1].to(stage.device))
            head.take(number, returned.low, returned.high, logits)
        if returned.kind == PREFILL:
            num_prefills -= 1
            num_waiting[number] -= 1
            if num_waiting[number]:
                continue
        tokens = head.advance(number)
        if tokens is not None:
            hidden = stage.decode(number, tokens)
            links.send(StageMessage(DECODE, number, 0, len(tokens), hidden))
            num_away += 1
    links.send(StageMessage(END, 0, 0, 0, None))
    return head.answers()


def _follow(stage: StageWorker, links: StageLinks, batch: Batch) -> None:
    """Another stage's part of a call."""
    while True:
        message = links.receive(wait=True)
        assert message is not None, "it was waited for"
        if message.kind == END:
            links.send(message)
            return
        assert message.hidden is not None
        if message.kind == PREFILL:
            hidden = stage.prefill(message.number, message.low, message.high, message.hidden)
        else:
            hidden = stage.decode(message.number, message.hidden)
        links.send(message._replace(hidden=hidden))
