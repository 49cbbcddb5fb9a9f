"""The messages that a stage sent to its neighbours, kept on a disk until a checkpoint has them.

After "Swift" (arXiv 2302.06173): the sender logs, so that nothing is shared until a stage is lost. A
message costs the training thread no copy on a CPU, as nobody writes to a sent tensor, and on a GPU
one copy on a stream beside the training's; a thread writes, many messages at once, as its waking
takes the interpreter from the training thread. Beyond the paper, a digest of every
received message is kept too: a replayed stage must send what its neighbours received, to the bit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.units import format_bytes, parse_bytes
from swift.pipeline.chunks import ChunkFile, read_header
from swift.pipeline.records import ChunkHeader, Key, Kind, MessageRecord, count_bytes

__all__ = ["BoundaryLog"]

_log = logging.getLogger(__name__)

GATHER_S = 0.1
"""Seconds for which messages are gathered before they are written, unless somebody waits for them."""
_MOST_MESSAGES = 512
"""Written in one call: Linux takes 1,024 parts, and a message has a header and its bytes."""


class BoundaryLog:
    """Logs one stage's messages; a file for each interval between checkpoints.

    Where logging fails (budget, full disk, full queue) training goes on, and the interval cannot be
    replayed; the next one is logged again.

    Args:
        folder: on a local disk; this stage's files lie in a folder of it.
        budget: bytes that this stage's files may take, as 200e9 or "200GB"; None: no limit.
        logged: for each boundary whether its messages are logged, as `select_logs` chooses; None: all.
        queue: bytes that may wait for the disk.
        when_full: what happens when more would wait: "block" training until the disk has caught up,
            or "drop" the interval.

    Raises:
        ConfigError: an argument is malformed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        budget: str | float | None = None,
        *,
        logged: Sequence[bool] | None = None,
        queue: str | float = "256MiB",
        when_full: str = "block",
    ) -> None:
        if when_full not in ("block", "drop"):
            raise ConfigError(f"expected when_full 'block' or 'drop', got {when_full!r}")
        self.folder = Path(folder)
        self.logged = None if logged is None else tuple(bool(is_logged) for is_logged in logged)
        self._budget = None if budget is None else parse_bytes(budget)
        self._queue_bytes, self._when_full = parse_bytes(queue), when_full
        self._writer: LogWriter | None = None

    def open(self, run: str, stage: int, iteration: int = 0) -> LogWriter:
        """Begins this stage's log; files of the stage that lie there already are removed.

        They are those of a run, or of a lost process, whose state nobody continues.

        Args:
            run: the run's id.
            stage: this process's.
            iteration: the first to be logged.

        Raises:
            ConfigError: the run's id takes more than 64 bytes.
            OSError: the folder cannot be made.
        """
        if len(run.encode()) > 64:
            raise ConfigError(f"expected a run's id of at most 64 bytes, got {run!r}")
        if self._writer is not None:
            self._writer.close()
        folder = self.folder / f"stage-{stage}"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.log"):
            path.unlink()
        self._writer = LogWriter(
            folder, run, stage, iteration,
            budget_bytes=self._budget, queue_bytes=self._queue_bytes, when_full=self._when_full,
        )  # fmt: skip
        return self._writer


class LogWriter:
    """The open log of one stage; made by `BoundaryLog.open`.

    Attributes:
        folder: of this stage's files.
        unreplayable: why this interval's log is incomplete; None: it is complete.
        logged_bytes: bytes of messages given to the disk so far.
        waited_s: seconds that training waited for the disk.
    """

    def __init__(
        self, folder: Path, run: str, stage: int, iteration: int, *,
        budget_bytes: int | None, queue_bytes: int, when_full: str,
    ) -> None:  # fmt: skip
        self.run, self.stage = run, stage
        self.unreplayable: str | None = None
        self.logged_bytes, self.waited_s = 0, 0.0
        self.folder = folder
        self._budget_bytes, self._queue_bytes = budget_bytes, queue_bytes
        self._blocks = when_full == "block"
        self._waiting: deque[tuple[Key, Tensor, torch.Event | None]] = deque()
        self._waiting_bytes, self._is_busy, self._is_closed = 0, False, False
        # `_changed` tells of every change of the queue; `_is_awaited` ends the gathering early.
        self._changed, self._is_awaited = threading.Condition(), threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._chunks: list[ChunkFile] = []
        self._start_chunk(iteration)
        self._thread = threading.Thread(target=self._write_all, name="boundary-log", daemon=True)
        self._thread.start()

    def append(self, key: Key, tensor: Tensor) -> None:
        """Logs a message that is sent, or the receipt of one; returns at once unless the queue is full.

        Args:
            key: of the message.
            tensor: that nobody writes to from now on.
        """
        if self.unreplayable is not None:
            return
        held, event = self._to_host(tensor.detach())
        size = held.nbytes
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + size > self._queue_bytes:
                if not self._blocks:
                    self._give_up(key, f"{format_bytes(self._waiting_bytes)} waited for the disk")
                    return
                self._wait_for_room(size)
            self._waiting.append((key, held, event))
            self._waiting_bytes += size
            if 2 * self._waiting_bytes > self._queue_bytes:
                self._is_awaited.set()
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until every message so far has been given to the operating system."""
        with self._changed:
            if self._waiting:
                self._is_awaited.set()
            self._changed.wait_for(lambda: not self._waiting and not self._is_busy)

    def start_interval(self, iteration: int) -> None:
        """A checkpoint of the state before `iteration` begins: a new file for later messages."""
        self.flush()
        with self._changed:
            for chunk in self._chunks[-1:]:
                chunk.end()
            self.unreplayable = None
            self._start_chunk(iteration)

    def forget(self, iteration: int) -> None:
        """Removes the files in which all messages are of iterations before `iteration`."""
        with self._changed:
            while len(self._chunks) > 1 and self._chunks[1].header.iteration <= iteration:
                self._chunks.pop(0).remove()

    def find_gap(self, kind: Kind, start: int, stop: int, num_micro_batches: int) -> str | None:
        """Why messages of iterations start..stop-1 cannot be replayed; None if all are there."""
        self.flush()
        for iteration in range(start, stop):
            for k in range(num_micro_batches):
                key = Key(kind, iteration, k)
                if self._find(key) is None:
                    why = f": {self.unreplayable}" if self.unreplayable else ""
                    return f"stage {self.stage} has not logged the {key}{why}"
        return None

    def read(self, key: Key) -> Tensor:
        """A logged message.

        Raises:
            DataError: it was not logged, its file is missing or of another run, or it is damaged.
        """
        chunk, record = self._get(key)
        try:
            header = read_header(chunk.path)
            if header.run != self.run:
                raise DataError(
                    f"{chunk.path}: expected messages of run {self.run!r}, got run {header.run!r}; "
                    f"give each run a folder of its own"
                )
            with chunk.path.open("rb") as file:
                return record.read(file)
        except FileNotFoundError:
            raise DataError(
                f"{chunk.path}, which holds the {key}, is missing; go back to the checkpoint"
            ) from None

    def describe(self, key: Key) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a logged message.

        Raises:
            DataError: it was not logged.
        """
        return self._get(key)[1].shape, self._get(key)[1].dtype

    def digest_of(self, key: Key) -> int | None:
        """The digest of a logged or received message; None if there is none."""
        self.flush()
        found = self._find(key)
        return None if found is None else found[1].digest

    def close(self, *, remove: bool = False) -> None:
        """Writes what waits and ends the file; with `remove`, no file stays."""
        with self._changed:
            self._is_closed = True
            self._is_awaited.set()
            self._changed.notify_all()
        self._thread.join()
        for chunk in self._chunks[-1:]:
            chunk.end()
        if remove:
            for chunk in self._chunks:
                chunk.remove()
            with suppress(OSError):  # something else lies there
                self.folder.rmdir()

    def _get(self, key: Key) -> tuple[ChunkFile, MessageRecord]:
        self.flush()
        found = self._find(key)
        if found is None:
            raise DataError(
                f"stage {self.stage} has not logged the {key}; go back to the checkpoint"
            )
        return found

    def _find(self, key: Key) -> tuple[ChunkFile, MessageRecord] | None:
        with self._changed:
            for chunk in reversed(self._chunks):
                if (record := chunk.records.get(key)) is not None:
                    return chunk, record
        return None

    def _to_host(self, tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
        if not tensor.is_cuda:
            return tensor.contiguous(), None
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            held.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            return held, self._stream.record_event()

    def _wait_for_room(self, size: int) -> None:
        start = time.perf_counter()
        self._is_awaited.set()
        self._changed.wait_for(
            lambda: not self._waiting_bytes or self._waiting_bytes + size <= self._queue_bytes
        )
        self.waited_s += time.perf_counter() - start

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
            self._is_awaited.wait(GATHER_S)
            self._is_awaited.clear()
            while self._write_some():
                pass

    def _write_some(self) -> bool:
        """Writes the first of the messages that wait, of an eighth of the queue; whether there were any."""
        with self._changed:
            taken, num_bytes = [], 0
            while self._waiting and len(taken) < _MOST_MESSAGES:
                size = self._waiting[0][1].nbytes
                if taken and 8 * (num_bytes + size) > self._queue_bytes:
                    break
                taken.append(self._waiting.popleft())
                num_bytes += size
            if not taken:
                return False
            chunk, self._is_busy = self._chunks[-1], True
            is_wanted = self.unreplayable is None
        try:
            if is_wanted:
                self._write(chunk, taken)
        except Exception as error:  # noqa: BLE001 - training waits for this thread
            with self._changed:
                self._give_up(taken[0][0], str(error) or repr(error))
        finally:
            with self._changed:
                self._waiting_bytes -= num_bytes
                self._is_busy = False
                self._changed.notify_all()
        return True

    def _write(
        self, chunk: ChunkFile, waiting: Iterable[tuple[Key, Tensor, torch.Event | None]]
    ) -> None:
        with self._changed:
            used = sum(each.num_bytes for each in self._chunks)
        messages = []
        for key, tensor, event in waiting:
            if event is not None:
                event.synchronize()
            used += count_bytes(key, tensor)
            if self._budget_bytes is not None and used > self._budget_bytes:
                why = f"the budget of {format_bytes(self._budget_bytes)} is used up"
                with self._changed:
                    self._give_up(key, why)
                break
            messages.append((key, tensor))
        records = chunk.append(messages)
        with self._changed:
            for record in records:
                chunk.records[record.key] = record
                self.logged_bytes += record.num_bytes

    def _give_up(self, where: Key | str, why: str) -> None:
        self.unreplayable = self.unreplayable or f"logging stopped at {where}, as {why}"
        _log.warning(
            "the neighbours of stage %d cannot be replayed before the next checkpoint: %s",
            self.stage, self.unreplayable,
        )  # fmt: skip

    def _start_chunk(self, iteration: int) -> None:
        sequence = self._chunks[-1].header.sequence + 1 if self._chunks else 0
        header = ChunkHeader(run=self.run, stage=self.stage, sequence=sequence, iteration=iteration)
        try:
            self._chunks.append(ChunkFile(self.folder / f"{sequence:06d}.log", header))
        except OSError as error:
            self._give_up(f"iteration {iteration}", str(error))
