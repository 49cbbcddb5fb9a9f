"""Calls of a function that may hang or crash, in worker processes.

A worker process that exceeds its limit, or whose caller stopped waiting, is killed
and replaced. Each worker leads a process group, so that what its function has started is killed with
it; if calls have a time limit a spare worker stands ready, as starting one takes longer than most
calls.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from shared.errors import ConfigError, DataError

__all__ = [
    "CallLimits",
    "CallWorkers",
    "RewardCall",
    "RewardFailure",
    "out_of_time",
]

# Seconds between two looks at whether workers live: what a worker has forked keeps its link open.
_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of the function for some rows: a sample and a text, or lists of them if batched."""

    rows: range
    sample: Any
    text: Any


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a row has no reward, and what the function raised if it did."""

    reason: str
    cause: BaseException | None = None


def out_of_time(limit_s: float | None) -> RewardFailure:
    """The failure of a row whose call took too long."""
    return RewardFailure(f"it took longer than time_limit_s={limit_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What a call in a worker process may take; None: no limit.

    Attributes:
        time_s: until its answer, in seconds.
        cpu_s: of processor time of the worker, and of each process that it starts; in seconds.
        memory_bytes: that the worker, and each process that it starts, may allocate.
    """

    time_s: float | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None


class CallWorkers:
    """Processes that live between calls, and run one call of the function at a time each."""

    def __init__(self, pickled: bytes, num_workers: int, limits: CallLimits) -> None:
        """Starts the processes.

        Args:
            pickled: pickled function from a `RewardCall` to a list with each row's result, a
                `RewardFailure` or any other value.
            num_workers: number of processes.
            limits: limits of each call.
        """
        self._pickled, self._limits = pickled, limits
        # Two threads that used one worker at once would receive each other's answers.
        self._lock = threading.Lock()
        self._workers = [self._started() for _ in range(num_workers)]
        self._spares = [self._started()] if limits.time_s is not None else []
        # Also when the interpreter ends: multiprocessing would kill workers, not what they started.
        self.close = weakref.finalize(self, _stop_all, self._workers, self._spares)

    def _started(self) -> _Worker:
        return _Worker(self._pickled, self._limits)

    def run(self, calls: list[RewardCall]) -> Iterator[tuple[RewardCall, list[Any]]]:
        """Yields calls with their rows' results, in the order in which calls end."""
        waiting, num_missing = deque(calls), len(calls)
        with self._lock:
            try:
                while num_missing:
                    for k in range(len(self._workers)):
                        self._give(k, waiting)
                    for k in self._wait():
                        if (ended := self._take(k)) is not None:
                            num_missing -= 1
                            yield ended
            except BaseException:
                # Late answers of these workers would be taken for answers to the next calls.
                for k, worker in enumerate(self._workers):
                    if worker.call is not None:
                        self._replace(k)
                raise

    def _give(self, k: int, waiting: deque[RewardCall]) -> None:
        if self._workers[k].is_ready and waiting:
            if not self._workers[k].process.is_alive():  # it died since the last call
                self._replace(k)
                return
            try:
                self._workers[k].give(waiting[0], self._limits.time_s)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise DataError(
                    f"reward: row {waiting[0].rows[0]}: its object columns cannot be sent to a "
                    f"worker process: {error}; drop them, or set in_process=True"
                ) from error
            waiting.popleft()

    def _wait(self) -> list[int]:
        """Workers that have answered, died or run out of time."""
        busy = {worker.link: k for k, worker in enumerate(self._workers) if not worker.is_ready}
        deadline = min(self._workers[k].deadline for k in busy.values())
        wait_s = min(max(0.0, deadline - time.monotonic()), _CHECK_S)
        ended, now = connection.wait(list(busy), wait_s), time.monotonic()
        return [
            k
            for link, k in busy.items()
            if link in ended
            or self._workers[k].deadline <= now
            or not self._workers[k].process.is_alive()
        ]

    def _take(self, k: int) -> tuple[RewardCall, list[Any]] | None:
        worker = self._workers[k]
        call = worker.call
        is_alive = worker.process.is_alive()  # before the poll, as it may answer and die
        try:
            if worker.link.poll():
                message = worker.link.recv()
                worker.become_ready()
            elif is_alive:
                message = out_of_time(self._limits.time_s)
            else:
                message = RewardFailure(self._death(worker.process.exitcode))
        except (EOFError, OSError):
            worker.process.join(5)
            message = RewardFailure(self._death(worker.process.exitcode))
        if call is None:  # it was starting
            if message is not None:
                told = message.reason if isinstance(message, RewardFailure) else message
                raise ConfigError(
                    f"reward: a worker process could not load the function: {told}; it must be "
                    "importable there, and a script must run its own code under "
                    "`if __name__ == '__main__':`"
                )
            return None
        if isinstance(message, RewardFailure):
            self._replace(k)
            message = [message] * len(call.rows)
        return call, message

    def _death(self, code: int | None) -> str:
        if code == -signal.SIGXCPU:
            return f"it took more processor time than cpu_limit_s={self._limits.cpu_s}"
        return f"its worker process died, exit code {code}"

    def _replace(self, k: int) -> None:
        self._workers[k].stop()
        self._spares.append(self._started())
        self._workers[k] = self._spares.pop(0)


def _stop_all(*groups: list[_Worker]) -> None:
    for worker in (worker for group in groups for worker in group):
        worker.stop()


class _Worker:
    """One process: starting, ready, or with a call."""

    def __init__(self, pickled: bytes, limits: CallLimits) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, pickled, limits), daemon=True)
        self.process.start()
        theirs.close()
        self.is_ready, self.deadline = False, math.inf
        self.call: RewardCall | None = None

    def give(self, call: RewardCall, limit_s: float | None) -> None:
        self.link.send(call)
        self.is_ready, self.call = False, call
        self.deadline = math.inf if limit_s is None else time.monotonic() + limit_s

    def become_ready(self) -> None:
        self.is_ready, self.call, self.deadline = True, None, math.inf

    def stop(self) -> None:
        """Kills the process and all that it has started, also after it has died itself."""
        assert self.process.pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):  # it has no group yet, or no longer
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.link.close()


def _serve(link: connection.Connection, pickled: bytes, limits: CallLimits) -> None:
    """A worker process: sends None once it has loaded the function, then answers calls."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    try:
        answers = pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - sent to the parent, which raises it
        link.send(traceback.format_exc())
        return
    if limits.memory_bytes is not None:
        # Of the heap, not of addresses: libraries reserve many more than they touch.
        _lower(resource.RLIMIT_DATA, limits.memory_bytes)
    link.send(None)
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            call = link.recv()
            if limits.cpu_s is not None:
                _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + limits.cpu_s))
            link.send([_portable(outcome) for outcome in answers(call)])


def _lower(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _portable(outcome: Any) -> Any:
    """Makes a failure's cause picklable, as its traceback in text."""
    if isinstance(outcome, RewardFailure) and outcome.cause is not None:
        told = "".join(traceback.format_exception(outcome.cause))
        return RewardFailure(outcome.reason, RuntimeError(f"in the worker process:\n{told}"))
    return outcome
