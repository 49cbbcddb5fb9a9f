"""One rank's worker objects and the calls on them; the same for every engine.

Colocated models, those on one resource pool, are objects of one executor: they share the device and
run in the order of their calls.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hybridflow.workers.batch.batch import PADDING, Batch
from hybridflow.workers.worker import Context, Worker
from shared.errors import ConfigError, describe_mistake

__all__ = [
    "Failure",
    "Gather",
    "RankExecutor",
    "RankTask",
    "Reply",
    "Segment",
    "Slot",
    "ValueStore",
    "read_value",
    "take_rows",
]


@runtime_checkable
class ValueStore(Protocol):
    """How an engine stores values for other processes to read."""

    def pack(self, value: Any) -> Any:
        """Stores a value; returns a handle, which can be sent to any process."""

    def load(self, handle: Any, /, wanted: Callable[[Any], Any] | None = None) -> Any:
        """The value of a handle, or `wanted(value)`: a copy that the caller may write to."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a packed batch; all of them when stop is None."""

    handle: Any
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """A batch that the rank using it assembles from segments.

    Attributes:
        operands: for each operand of a union, segments to concatenate, and the columns to read
            (None: all).
        padding: for each row whether it is padding; None when no row is.
    """

    operands: Sequence[tuple[Sequence[Segment], Sequence[str] | None]]
    padding: Sequence[bool] | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder for the argument at an index of the task's own values."""

    index: int


class RankTask(NamedTuple):
    """One call on one rank; a tuple, which is pickled several times faster than a dataclass.

    Attributes:
        call: number of the call.
        target: the group's name; "" for the executor itself.
        method: name of the method.
        common: handle of (args, kwargs), with a `Slot` for each value that differs by rank; None
            when there are no arguments.
        own: the values of the slots, each a `Gather`, or a `Segment` of any value.
    """

    call: int
    target: str
    method: str
    common: Any = None
    own: Sequence[Gather | Segment | Sequence[Segment]] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as another process can read it."""

    kind: str
    message: str
    trace: str
    mistake: str | None = None


class Reply(NamedTuple):
    """A call's outcome on one rank: a handle of its result, or a failure; and its seconds.

    The handle is None if the method returned None (see `read_value`).
    """

    call: int
    rank: int
    handle: Any = None
    num_rows: int | None = None
    failure: Failure | None = None
    seconds: float = 0.0


def read_value(handle: Any, store: ValueStore) -> Any:
    """The value of a reply's handle."""
    return None if handle is None else store.load(handle)


class RankExecutor:
    """Runs tasks, one after another."""

    def __init__(self, store: ValueStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._workers: dict[str, Worker] = {}

    def run(self, task: RankTask) -> Reply:
        """Runs one call; an exception becomes the reply's failure."""
        begun = time.perf_counter()
        try:
            args, kwargs = self._arguments(task)
            if task.target:
                method = getattr(self._worker(task.target), task.method)
            else:
                method = {"create": self._create, "remove": self._remove, "ping": _nothing}[
                    task.method
                ]
            value = _without_padding(method(*args, **kwargs), task)
            rows = len(value) if isinstance(value, Batch) else None
            handle = None if value is None else self._store.pack(value)
            return Reply(task.call, self._rank, handle, rows, seconds=time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 - sent to the controller, which raises it
            trace = error.__traceback__
            trace = trace.tb_next if trace is not None else None  # leaves this frame out
            text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
            mistake = describe_mistake(error)
            failure = Failure(type(error).__name__, str(error), text, mistake)
            taken = time.perf_counter() - begun
            return Reply(task.call, self._rank, failure=failure, seconds=taken)

    def _create(
        self, name: str, kind: type[Worker], context: Context, args: tuple, kwargs: dict
    ) -> None:
        worker = kind.__new__(kind)
        worker.context = context.at(self._rank)
        worker.__init__(*args, **kwargs)
        self._workers[name] = worker

    def _remove(self, name: str) -> None:
        self._worker(name).close()
        del self._workers[name]

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            raise ConfigError(
                f"there is no group {name!r} on this rank; it was removed, or could not be made"
            )
        return self._workers[name]

    def _arguments(self, task: RankTask) -> tuple[tuple, dict]:
        if task.common is None:
            return (), {}
        args, kwargs = self._store.load(task.common)
        if not task.own:
            return args, kwargs
        own = [self._own(item) for item in task.own]

        def fill(value: Any) -> Any:
            return own[value.index] if isinstance(value, Slot) else value

        return tuple(map(fill, args)), {key: fill(value) for key, value in kwargs.items()}

    def _own(self, item: Any) -> Any:
        if isinstance(item, Segment):
            return read_value(item.handle, self._store)
        if isinstance(item, Gather):
            return self.gather(item)
        return [read_value(segment.handle, self._store) for segment in item]

    def gather(self, item: Gather) -> Batch:
        """The batch that a `Gather` describes."""
        whole: Batch | None = None
        for segments, columns in item.operands:
            parts = [self._part(segment, columns) for segment in segments]
            operand = Batch.concat(parts)
            whole = operand if whole is None else whole | operand
        assert whole is not None, "a union has operands"
        if item.padding is not None:
            whole = whole | Batch({PADDING: torch.tensor(item.padding)})
        return whole

    def _part(self, segment: Segment, columns: Sequence[str] | None) -> Batch:
        # Picklable, not a closure: it may be applied on the machine that holds the batch.
        wanted = partial(take_rows, columns=columns, start=segment.start, stop=segment.stop)
        return self._store.load(segment.handle, wanted)


def take_rows(batch: Batch, columns: Sequence[str] | None, start: int, stop: int | None) -> Batch:
    """Some columns (None: all) of rows [start, stop); of all rows when stop is None."""
    batch = batch if columns is None else batch.select(*columns)
    return batch if stop is None else batch.rows(start, stop)


def _without_padding(value: Any, task: RankTask) -> Any:
    """Drops padding rows from a result that has one row for each row of the input."""
    if not isinstance(value, Batch):
        return value
    if PADDING in value:
        return value.without_padding()
    marks = [own.padding for own in task.own if isinstance(own, Gather) and own.padding is not None]
    if marks and len(marks[0]) == len(value):
        kept = [row for row, is_padding in enumerate(marks[0]) if not is_padding]
        return value.reorder(kept)
    return value


def _nothing() -> None:
    """Returns, which shows that the rank answers."""
