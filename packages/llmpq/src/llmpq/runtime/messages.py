"""Messages between a plan's stages: each link has a lane of its own, and keeps their order.

Sends never wait for receives, so that a stage needs to know no more than the next header. A rank that
stands still or fails is named by all others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from shared.comms import Group, PendingRounds, Round, post_rounds
from shared.comms.courier import connect
from shared.errors import CommError

__all__ = [
    "DECODE",
    "END",
    "PHASES",
    "PREFILL",
    "Progress",
    "StageLinks",
    "StageMessage",
    "all_through",
]

PREFILL, DECODE, END, FAILED = range(4)
PHASES = ("prefill", "decode", "end", "failure")
_MOST_OF_TIMEOUT = 0.9
"""Share of the timeout after which a failure to receive is taken for its end."""
_GRACE_S, _MOST_GRACE_S = 3.0, 30.0
"""Seconds that ranks whose timeouts are over wait for each other's word, at least and at most."""
_MOST_TASK_S = 3600
_BOARDS = count()
"""Numbers of this process's boards, the same on all ranks as these make the same ones."""
_MOST_UNSENT = 64
"""Messages that may wait to be sent; more would hold their memory."""


class StageMessage(NamedTuple):
    """What is sent along: kind of work, decode micro-batch, its rows; and hidden states."""

    kind: int
    number: int
    low: int
    high: int
    hidden: Tensor | None


class StageLinks:
    """Messages from the stage before to the one after; alone, they come back at once."""

    def __init__(
        self, group: Group, ranks: list[int], number: int | None, plan: Plan, spec: ModelSpec
    ) -> None:
        self.is_alone = len(ranks) == 1
        self._ranks, self._number, self.num_stages = ranks, number, len(ranks)
        self._timeout_s = group.timeout.total_seconds()
        self._width, self._dtype = spec.hidden_size, getattr(torch, plan.dtype)
        self._device = group.device
        self._arrived: queue.SimpleQueue[StageMessage | BaseException] = queue.SimpleQueue()
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
        """Starts to receive, until a message of the kind `END` has arrived."""
        if not self.is_alone:
            threading.Thread(target=self._read, name="llmpq-receiver", daemon=True).start()

    def send(self, message: StageMessage) -> None:
        """Posts a message to the next stage; returns at once."""
        if self.is_alone:
            if message.kind != END:
                self._arrived.put(message)
            return
        assert self._number is not None, "a rank without a stage sends nothing"
        hidden = message.hidden
        if hidden is not None and message.kind == PREFILL and self._number == self.num_stages - 1:
            hidden = hidden[:, -1:]  # the head wants no more
        num_tokens = 0 if hidden is None else hidden.shape[1]
        sent = [torch.tensor([*message[:4], num_tokens], device=self._device)]
        if hidden is not None:
            sent.append(hidden.to(self._device).contiguous())
        pair, peer = self._link(self._number)
        rounds = [Round(send_to=peer, send=one, recv_from=peer, recv=None) for one in sent]
        self._sending.append(
            post_rounds(pair, rounds, PHASES[message.kind], lane=_lane(self._number))
        )
        while len(self._sending) > _MOST_UNSENT:
            self._sending.popleft().wait_all()

    def receive(self, *, wait: bool) -> StageMessage | None:
        """The next message; None where there is none yet and it is not to be waited for."""
        try:
            found = self._arrived.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(found, TimeoutError):
            self._at_fault = self._find_silent()
            found = CommError(
                f"expected rank {self._at_fault} to go on with its stage; nothing came of it for "
                f"{self._timeout_s:.0f} s: it stands still; start all ranks anew to resume"
            )
        if isinstance(found, BaseException):
            # The stages after this one wait for what will not come; the rank at fault goes round.
            self.send(StageMessage(FAILED, self._at_fault, 0, 0, None))
            raise found
        return found

    def fail(self) -> None:
        """Tells the stages after this one that it fails, so that none waits for it."""
        if not self.is_alone and self._number is not None:
            self.send(StageMessage(FAILED, self._ranks[self._number], 0, 0, None))

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
            assert last.kind == END, "nothing is under way at the end of a call"

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
                if kind == FAILED:
                    self._at_fault = number
                    raise CommError(
                        f"expected rank {number} to go on with its stage; it died or stands still, "
                        f"as the stages behind it say; start all ranks anew to resume"
                    )
                hidden = None
                if num_tokens:
                    shape = high - low, num_tokens, self._width
                    hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
                    take(hidden)
                self._arrived.put(StageMessage(kind, number, low, high, hidden))
                if kind == END:
                    return
        except BaseException as error:  # noqa: BLE001 - raised where it is received
            is_late = time.monotonic() - begun >= _MOST_OF_TIMEOUT * self._timeout_s
            self._arrived.put(TimeoutError() if is_late else error)


def _lane(link: int) -> str:
    return f"llmpq{link}"


@contextmanager
def all_through(group: Group, task: str) -> Iterator[None]:
    """Waits behind its block until all ranks are through theirs, however unlike their machines are.

    Not a barrier of the group: the block may take longer than its timeout, which is for messages.

    Args:
        group: ranks that enter the block alike.
        task: what the block does, for errors: "load its stage".

    Raises:
        CommError: another rank's block failed, or is not through within an hour.
    """
    if group.world_size == 1:
        yield
        return
    board = group.board(f"llmpq/through/{next(_BOARDS)}")
    try:
        yield
    except BaseException:
        board.set(str(group.rank), "failed")
        raise
    board.set(str(group.rank), "done")
    left = [rank for rank in range(group.world_size) if rank != group.rank]
    end = time.monotonic() + _MOST_TASK_S
    while left:
        for rank in [rank for rank in left if board.check([str(rank)])]:
            if board.get(str(rank)) != b"done":
                raise CommError(f"expected rank {rank} to {task}; it failed, and says why")
            left.remove(rank)
        if left and time.monotonic() > end:
            raise CommError(f"expected rank {left[0]} to {task} within {_MOST_TASK_S} s")
        time.sleep(0.02 if left else 0.0)


class Progress:
    """Word of a rank's work to one that waits for its end, which may take longer than a message may."""

    def __init__(self, group: Group, worker: int) -> None:
        """Every rank of the group makes one for the same worker."""
        self._board = group.board(f"llmpq/progress/{next(_BOARDS)}")
        self._worker, self._timeout_s = worker, group.timeout.total_seconds()
        self._calls, self._told_s, self._steps = 0, 0.0, 0

    def begin(self) -> None:
        """Begins the next call, on both ranks."""
        self._calls += 1

    def step(self) -> None:
        """Tells that work goes on, at most once a second."""
        self._steps += 1
        if time.monotonic() - self._told_s >= 1.0:
            self._told_s = time.monotonic()
            self._board.set(str(self._calls), str(self._steps))

    def end(self, *, has_failed: bool) -> None:
        """Tells that the call is over."""
        self._board.set(str(self._calls), "failed" if has_failed else "done")

    def wait(self) -> None:
        """Waits for the end of the call.

        Raises:
            CommError: the worker failed, or nothing was heard of it for the group's timeout.
        """
        last, heard_s, key = b"", time.monotonic(), str(self._calls)
        while last != b"done":
            found = self._board.get(key) if self._board.check([key]) else b""
            if found == b"failed":
                raise CommError(f"expected answers of rank {self._worker}; it failed, and says why")
            if found != last:
                last, heard_s = found, time.monotonic()
            elif time.monotonic() - heard_s > self._timeout_s:
                raise CommError(
                    f"expected rank {self._worker} to go on answering; nothing was heard of it for "
                    f"{self._timeout_s:.0f} s; start all ranks anew to resume"
                )
            time.sleep(0.02)
