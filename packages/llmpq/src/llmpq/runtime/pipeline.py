"""Generates with a plan's stages, each on its rank, micro-batches passing round the ring at once.

The first stage embeds tokens and chooses the next ones; hidden states pass from stage to stage, and
from the last one back to the first. Every link has a lane of its own, sends never wait for receives,
and messages keep their order, so that each stage needs to know no more than the next header.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from llmpq.runtime.layers import read_config
from llmpq.runtime.loader import check_plan, load_stage
from llmpq.runtime.sampling import Sampling
from llmpq.runtime.stage import Batch, StageSeconds, StageWorker
from shared.comms import Group, PendingRounds, Round, post_rounds
from shared.comms.courier import connect
from shared.errors import CommError, ConfigError, DataError

__all__ = ["Pipeline"]

_PREFILL, _DECODE, _END, _FAILED = range(4)
_PHASES = ("prefill", "decode", "end", "failure")
_MOST_OF_TIMEOUT = 0.9
"""Share of the timeout after which a failure to receive is taken for its end."""
_GRACE_S, _MOST_GRACE_S = 3.0, 30.0
"""Seconds that ranks whose timeouts are over wait for each other's word, at least and at most."""
_MOST_LOADING_S = 3600
_LOADS = count()
"""Numbers of this process's pipelines, the same on all ranks as these make the same ones."""
_MOST_UNSENT = 64
"""Messages that may wait to be sent; more would hold their memory."""


class _Message(NamedTuple):
    """What is sent along: kind of work, decode micro-batch, its rows; and hidden states."""

    kind: int
    number: int
    low: int
    high: int
    hidden: Tensor | None


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
            ConfigError: the plan is of another model, or names a rank that there is not.
        """
        check_plan(plan, folder)
        self._plan, self._folder = plan, Path(folder)
        self._shape = ModelSpec.from_hf(folder)
        self._group = Group.world()
        self._device = torch.device(self._group.device if device is None else device)
        config = read_config(folder)
        # Learned positions end; computed ones go on.
        is_learned = config.model_type == "opt"
        self._most_positions = config.max_position_embeddings if is_learned else None
        ranks = [stage.rank for stage in plan.stages]
        if max(ranks) >= self._group.world_size:
            raise ConfigError(
                f"expected at least {max(ranks) + 1} ranks, as a stage is on rank {max(ranks)}, "
                f"got {self._group.world_size}; start more, or plan for fewer devices"
            )
        self._ranks = ranks
        me = self._group.rank
        self._number = ranks.index(me) if me in ranks else None
        self._stage: StageWorker | None = None
        self.read_bytes = 0
        self._ring: _Ring | None = None
        self._way_home: Group | None = None

    def __enter__(self) -> Pipeline:
        with _all_loaded(self._group):
            if self._number is not None:
                model, self.read_bytes = load_stage(self._folder, self._plan, self._number)
                self._stage = StageWorker(model, self._plan, self._shape, self._device)
        # Every rank of the world takes part in making groups, members or not.
        self._ring = _Ring(self._group, self._ranks, self._number, self._plan, self._shape)
        if self._ranks[0]:
            self._way_home = Group.of([0, self._ranks[0]])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stage = self._ring = None

    @property
    def plan(self) -> Plan:
        """What it runs."""
        return self._plan

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

        Args:
            input_ids: the prompts, padded on either side.
            attention_mask: 1 for tokens that count; all do without one.
            max_new_tokens: most tokens a prompt gets.
            eos_token_id: ends a prompt's answer, of which it is the last token; or several that do.
            pad_token_id: stands behind an answer that has ended.
            temperature: 0 takes the most probable token, see `Sampling`.
            top_p: see `Sampling`.
            seed: of draws; with a prompt's number and position it decides them under any plan.
            prompt_numbers: numbers of the prompts for the draws, by default from 0.

        Returns:
            The new tokens, on rank 0; None elsewhere.

        Raises:
            DataError: shapes do not fit, or a prompt is empty.
            CommError: another stage died or stands still; names its rank.
        """
        if self._ring is None:
            raise ConfigError(
                "expected an entered pipeline; call generate inside `with Pipeline(...)`"
            )
        ids, mask = _pad_left(input_ids, attention_mask, pad_token_id)
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
        found = None
        if self._stage is not None:
            self._stage.begin(batch)
            self._ring.begin()
            try:
                if self._number == 0:
                    numbers = torch.arange(len(ids)) if prompt_numbers is None else prompt_numbers
                    is_one = isinstance(eos_token_id, int)
                    ends = [eos_token_id] if is_one else list(eos_token_id or ())
                    head = _Head(batch, sampling, numbers, ends, pad_token_id)
                    found = _lead(self._stage, self._ring, batch, ids, head)
                else:
                    _follow(self._stage, self._ring, batch)
                self._ring.flush()
            except CommError:
                raise
            except BaseException:
                self._ring.fail()
                raise
            finally:
                self._stage.end()
        return self._bring_home(found, batch)

    def _bring_home(self, found: Tensor | None, batch: Batch) -> Tensor | None:
        """Sends the tokens from the first stage's rank to rank 0."""
        first, me, pair = self._ranks[0], self._group.rank, self._way_home
        if pair is None or me not in (0, first):
            return found if me == 0 else None
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


@contextmanager
def _all_loaded(group: Group) -> Iterator[None]:
    """Waits behind its block until all ranks are through theirs, however unlike their disks are.

    Not a barrier of the group: loading may take longer than its timeout, which is for messages.
    """
    if group.world_size == 1:
        yield
        return
    board = group.board(f"llmpq/loaded/{next(_LOADS)}")
    try:
        yield
    except BaseException:
        board.set(str(group.rank), "failed")
        raise
    board.set(str(group.rank), "done")
    left = [rank for rank in range(group.world_size) if rank != group.rank]
    end = time.monotonic() + _MOST_LOADING_S
    while left:
        for rank in [rank for rank in left if board.check([str(rank)])]:
            if board.get(str(rank)) != b"done":
                raise CommError(f"expected rank {rank} to load its stage; it failed, and says why")
            left.remove(rank)
        if left and time.monotonic() > end:
            raise CommError(f"expected rank {left[0]} to load its stage within {_MOST_LOADING_S} s")
        time.sleep(0.02 if left else 0.0)


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

    def take(self, number: int, low: int, high: int, logits: Tensor) -> None:
        """Chooses tokens for rows of a decode micro-batch."""
        first = self._batch.rows(number)[0]
        rows = slice(first + low, first + high)
        position = int(self._num_said[number])
        tokens = self._sampling.choose(logits, self._numbers[rows], position).cpu()
        tokens = torch.where(self._has_ended[rows], self._pad, tokens)
        self.tokens[rows, position] = tokens
        self._has_ended[rows] |= torch.isin(tokens, self._ends)

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


def _lead(stage: StageWorker, ring: _Ring, batch: Batch, ids: Tensor, head: _Head) -> Tensor:
    """The first stage's part of a call: all prefills, then every micro-batch as it returns."""
    prefills = deque(
        (number, low, high) for number in range(batch.num_decode)
        for low, high in batch.chunks(number)
    )  # fmt: skip
    num_waiting = [len(batch.chunks(number)) for number in range(batch.num_decode)]
    # A slow stage keeps no more prompts waiting than these, whatever the first one could send.
    num_prefills, most_prefills = 0, ring.num_stages + 2
    num_away = 0
    while prefills or num_away:
        is_full = not prefills or num_prefills >= most_prefills
        returned = ring.receive(wait=is_full) if num_away else None
        if returned is None:
            number, low, high = prefills.popleft()
            first = batch.rows(number)[0]
            hidden = stage.prefill(number, low, high, ids[first + low : first + high])
            ring.send(_Message(_PREFILL, number, low, high, hidden))
            num_prefills += 1
            num_away += 1
            continue
        num_away -= 1
        number = returned.number
        assert returned.hidden is not None
        with stage.timed(f"head_{_PHASES[returned.kind]}"):
            logits = stage.model.logits(returned.hidden[:, -1].to(stage.device))
            head.take(number, returned.low, returned.high, logits)
        if returned.kind == _PREFILL:
            num_prefills -= 1
            num_waiting[number] -= 1
            if num_waiting[number]:
                continue
        tokens = head.advance(number)
        if tokens is not None:
            hidden = stage.decode(number, tokens)
            ring.send(_Message(_DECODE, number, 0, len(tokens), hidden))
            num_away += 1
    ring.send(_Message(_END, 0, 0, 0, None))
    return head.answers()


def _follow(stage: StageWorker, ring: _Ring, batch: Batch) -> None:
    """Another stage's part of a call."""
    while True:
        message = ring.receive(wait=True)
        assert message is not None, "it was waited for"
        if message.kind == _END:
            ring.send(message)
            return
        assert message.hidden is not None
        if message.kind == _PREFILL:
            hidden = stage.prefill(message.number, message.low, message.high, message.hidden)
        else:
            hidden = stage.decode(message.number, message.hidden)
        ring.send(message._replace(hidden=hidden))


class _Ring:
    """Messages from the stage before to the one after; alone, they come back at once."""

    def __init__(
        self, group: Group, ranks: list[int], number: int | None, plan: Plan, spec: ModelSpec
    ) -> None:
        self.is_alone = len(ranks) == 1
        self._ranks, self._number, self.num_stages = ranks, number, len(ranks)
        self._timeout_s = group.timeout.total_seconds()
        self._width, self._dtype = spec.hidden_size, getattr(torch, plan.dtype)
        self._device = group.device
        self._arrived: queue.SimpleQueue[_Message | BaseException] = queue.SimpleQueue()
        self._sending: deque[PendingRounds] = deque()
        self._links: dict[int, Group] = {}
        # Rank of the stage that failed: the one before, unless that one knows better.
        self._at_fault = 0 if number is None else ranks[number - 1]
        if self.is_alone:
            return
        for link, rank in enumerate(ranks):
            ends = rank, ranks[(link + 1) % len(ranks)]
            pair = Group.of(sorted(ends))
            if number is not None and ranks[number] in ends:
                self._links[link] = pair
        for link, pair in self._links.items():
            connect(pair, [_lane(link)])

    def begin(self) -> None:
        """Starts to receive, until a message of the kind `_END` has arrived."""
        if not self.is_alone:
            threading.Thread(target=self._read, name="llmpq-receiver", daemon=True).start()

    def send(self, message: _Message) -> None:
        """Posts a message to the next stage; returns at once."""
        if self.is_alone:
            if message.kind != _END:
                self._arrived.put(message)
            return
        assert self._number is not None, "a rank without a stage sends nothing"
        hidden = message.hidden
        if hidden is not None and message.kind == _PREFILL and self._number == self.num_stages - 1:
            hidden = hidden[:, -1:]  # the head wants no more
        num_tokens = 0 if hidden is None else hidden.shape[1]
        sent = [torch.tensor([*message[:4], num_tokens], device=self._device)]
        if hidden is not None:
            sent.append(hidden.to(self._device).contiguous())
        pair, peer = self._link(self._number)
        rounds = [Round(send_to=peer, send=one, recv_from=peer, recv=None) for one in sent]
        self._sending.append(
            post_rounds(pair, rounds, _PHASES[message.kind], lane=_lane(self._number))
        )
        while len(self._sending) > _MOST_UNSENT:
            self._sending.popleft().wait_all()

    def receive(self, *, wait: bool) -> _Message | None:
        """The next message; None where there is none yet and it is not to be waited for."""
        try:
            found = self._arrived.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(found, TimeoutError):
            self._at_fault = self._find_silent()
            found = CommError(
                f"expected rank {self._at_fault} to go on with its stage; nothing came of it for "
                f"{self._timeout_s:.0f} s: it stands still; start all ranks anew to go on"
            )
        if isinstance(found, BaseException):
            # The stages after this one wait for what will not come; the rank at fault goes round.
            self.send(_Message(_FAILED, self._at_fault, 0, 0, None))
            raise found
        return found

    def fail(self) -> None:
        """Tells the stages after this one that it fails, so that none waits for it."""
        if not self.is_alone and self._number is not None:
            self.send(_Message(_FAILED, self._ranks[self._number], 0, 0, None))

    def _find_silent(self) -> int:
        """The rank that stands still: with all timeouts over at once, the one that does not say so."""
        assert self._number is not None
        board = Group.world().board("llmpq/timed-out")
        board.set(str(self._ranks[self._number]), "waits")
        end = time.monotonic() + max(_GRACE_S, min(0.1 * self._timeout_s, _MOST_GRACE_S))
        silent = self._ranks
        while len(silent) > 1 and time.monotonic() < end:
            time.sleep(0.1)
            silent = [rank for rank in self._ranks if not board.check([str(rank)])]
        return self._at_fault if self._at_fault in silent or not silent else silent[0]

    def flush(self) -> None:
        """Waits for what was sent, and on the first stage for the end to come round."""
        while self._sending:
            self._sending.popleft().wait_all()
        if not self.is_alone and self._number == 0:
            last = self.receive(wait=True)
            assert last is not None
            assert last.kind == _END, "nothing is under way at the end of a call"

    def _link(self, link: int) -> tuple[Group, int]:
        """A link's two ranks, and which of them is the other one."""
        pair = self._links[link]
        return pair, 1 - pair.rank

    def _read(self) -> None:
        assert self._number is not None
        link = (self._number - 1) % self.num_stages
        pair, peer = self._link(link)

        def take(into: Tensor) -> None:
            item = Round(send_to=peer, send=None, recv_from=peer, recv=into)
            post_rounds(pair, [item], "stage", lane=_lane(link)).wait_all()

        begun = time.monotonic()
        try:
            while True:
                header = torch.empty(5, dtype=torch.int64, device=self._device)
                begun = time.monotonic()
                take(header)
                kind, number, low, high, num_tokens = header.tolist()
                if kind == _FAILED:
                    self._at_fault = number
                    raise CommError(
                        f"expected rank {number} to go on with its stage; it died or stands still, "
                        f"as the stages behind it say; start all ranks anew to go on"
                    )
                hidden = None
                if num_tokens:
                    shape = high - low, num_tokens, self._width
                    hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
                    take(hidden)
                self._arrived.put(_Message(kind, number, low, high, hidden))
                if kind == _END:
                    return
        except BaseException as error:  # noqa: BLE001 - raised where it is received
            is_late = time.monotonic() - begun >= _MOST_OF_TIMEOUT * self._timeout_s
            self._arrived.put(TimeoutError() if is_late else error)


def _lane(link: int) -> str:
    return f"llmpq{link}"
