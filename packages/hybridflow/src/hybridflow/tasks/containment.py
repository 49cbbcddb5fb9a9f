"""Keeps functions that may run anybody's code from ending or changing this process.

A response that is run as code may exit, change the working directory, close stdout, set an alarm or
seed a generator. Within a `Containment` an exit is an exception, a change is undone, and signals still
reach the program's own handlers. What code does to objects of the program, to threads, or to files is
beyond this; for code that nobody has read there are worker processes.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.tasks.time_limits import ALARM, time_limit

__all__ = ["Containment", "Interruptions"]

_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE,
           resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)  # fmt: skip
# Bound here, as code may replace them.
_getpid, _monotonic = os.getpid, time.monotonic
# Modules whose functions code replaces so that other code cannot call them.
_MODULES = (builtins, os, shutil, signal, subprocess, time)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Interruptions:
    """Notes what the program's own signal handlers raise within a block.

    So that an exit that a handler asked for is told from one in the code that it interrupted, and is
    raised at the block's end even if that code has caught it.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            numbers = signal.valid_signals() - {ALARM}  # whose handler stays, see `time_limit`
            self._handlers = {number: signal.getsignal(number) for number in numbers}
            for number, handler in self._handlers.items():
                if callable(handler):
                    signal.signal(number, self._noting(handler))
        return self

    def _noting(self, handler: Callable[..., Any]) -> Callable[[int, FrameType | None], None]:
        def call(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                self.raised = error
                raise

        return call

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            # None: a handler that was not installed from Python.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def raise_again(self) -> None:
        """Raises what a handler has raised, if any has."""
        if self.raised is not None:
            raise self.raised


class _State(NamedTuple):
    """Something of the process that code may change; `write` undoes it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _read_directory() -> str:
    with contextlib.suppress(OSError):  # somebody has removed it
        return os.getcwd()
    return ""


def _write_directory(saved: str) -> None:
    with contextlib.suppress(OSError):
        os.chdir(saved)


def _write_environment(saved: dict[str, str]) -> None:
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


def _write_limits(saved: list[tuple[int, int]]) -> None:
    for kind, (soft, hard) in zip(_LIMITS, saved, strict=True):
        with contextlib.suppress(ValueError, OSError):  # a hard limit cannot be raised again
            resource.setrlimit(kind, (soft, hard))


_STATES = (
    _State("environment", lambda: dict(os.environ), _write_environment),
    _State(
        "sys.path", lambda: list(sys.path), lambda saved: sys.path.__setitem__(slice(None), saved)
    ),
    _State("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _State("trace function", sys.gettrace, sys.settrace),
    _State("profile function", sys.getprofile, sys.setprofile),
    _State(
        "resource limits", lambda: [resource.getrlimit(kind) for kind in _LIMITS], _write_limits
    ),
    _State("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _State("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _State("torch's threads", torch.get_num_threads, torch.set_num_threads),
    _State(
        "torch's deterministic mode",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
)


class Containment:
    """A block of calls, after which the process is as before; blocks may nest, and threads overlap.

    Attributes:
        changed: names of what the calls changed and this undid.
    """

    def __init__(self, seed: int, *, may_exit: bool = False) -> None:
        """Prepares a block.

        Args:
            seed: of the random numbers that the calls draw from Python's, numpy's and torch's global
                generators, whose own state they do not change.
            may_exit: whether `os._exit` and its like end this process, as somebody replaces it.
        """
        self._may_exit = may_exit
        self._seed, self.changed = seed, list[str]()
        self._interruptions = Interruptions()

    def __enter__(self) -> Containment:
        _enter(self._seed)
        self._interruptions.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._interruptions.__exit__(*error)
        self.changed += _leave()
        self._interruptions.raise_again()

    def raise_interruption(self) -> None:
        """Raises what a signal handler of the program has raised, if any has."""
        self._interruptions.raise_again()

    @contextlib.contextmanager
    def call(self, limit_s: float | None = None) -> Iterator[None]:
        """One call: what would end the process raises SystemExit instead, a copy of it is ended.

        Args:
            limit_s: seconds after which OutOfTime is raised; None: no limit. Needs the main thread.
        """
        pid, thread = _getpid(), threading.get_ident()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        is_outer = thread not in _callers and not self._may_exit
        if is_outer:
            _callers.add(thread)
        try:
            with time_limit(limit_s):
                yield
        finally:
            if _getpid() != pid:  # the code has forked, and this is the copy
                _exits["_exit"](1)
            self.changed += _undone[0].undo()
            if is_outer:
                _callers.discard(thread)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # what waits is handled here
            self._interruptions.raise_again()


# What is of the process is saved by the first of all blocks, and restored by the last.
_lock = threading.RLock()
_blocks: list[contextlib.ExitStack] = []
_changed: list[str] = []
_undone: list[_Undone] = []  # one, if there are blocks
_callers: set[int] = set()  # threads in a call
# Threads that no call has started. Not their numbers: a new thread takes that of one that has ended.
_outsiders: set[threading.Thread] = set()


def _enter(seed: int) -> None:
    with _lock, contextlib.ExitStack() as stack:
        if not _blocks:
            _install_exits()
            _changed.clear()
            _undone[:] = [_Undone()]
            stack.callback(_undone[0].close)
            _outsiders.clear()
            _outsiders.update(threading.enumerate())
            for part in (_restored(_changed), _open_streams(), _seeded(seed)):
                stack.enter_context(part)
        _blocks.append(stack.pop_all())


def _leave() -> list[str]:
    with _lock:
        _blocks.pop().close()  # all but the first are empty
        return [] if _blocks else list(_changed)


@contextlib.contextmanager
def _restored(changed: list[str]) -> Iterator[None]:
    saved = [state.read() for state in _STATES]
    try:
        yield
    finally:
        for state, value in zip(_STATES, saved, strict=True):
            if (present := state.read()) != value:
                state.write(value)
                if state.read() != present:
                    changed.append(state.name)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global generators with a seed; afterwards they have the state from before."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = []
    if torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if devices:
            torch.cuda.set_rng_state_all(devices)


class _Stream:
    """A stream of the process that cannot be closed, nor can the streams that it writes to."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        # Another TextIOWrapper around the buffer would close it when it is collected.
        return _Stream(value) if name in ("buffer", "raw") else value

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def __next__(self) -> Any:
        return next(self._stream)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Does nothing."""

    def detach(self) -> Any:
        """Returns the buffer, and keeps it too."""
        return self.buffer


@contextlib.contextmanager
def _open_streams() -> Iterator[None]:
    """Stdin, stdout and stderr that code cannot close."""
    streams = {name: getattr(sys, name) for name in _STREAMS}
    for name, stream in streams.items():
        setattr(sys, name, stream and _Stream(stream))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


class _Undone:
    """What is undone after each call already, as it would reach into the next one."""

    def __init__(self) -> None:
        self._functions = [(vars(module), dict(vars(module))) for module in _MODULES]
        self.pid = _getpid()
        self._directory = _read_directory()
        self._files: list[tuple[int, int]] = []
        for number in range(3):
            with contextlib.suppress(OSError):  # closed before
                self._files.append((os.dup(number), number))
        self._timers = [(timer, *signal.getitimer(timer)) for timer in _TIMERS]
        self._start = _monotonic()

    def undo(self) -> list[str]:
        """Undoes what a call has changed; returns names of it."""
        for module, functions in self._functions:  # before anything here calls one of them
            if module != functions:
                module.update(functions)
        for copy, number in self._files:
            with contextlib.suppress(OSError):  # the code has closed the copy too
                os.dup2(copy, number)
        for timer, left_s, interval_s in self._timers:
            rest_s = left_s - (_monotonic() - self._start)
            if not left_s:
                signal.setitimer(timer, 0)
            elif timer == signal.ITIMER_REAL:  # the program's own goes on
                if rest_s <= 0:  # it has rung: until its next ring, or never again
                    rest_s = rest_s % interval_s or interval_s if interval_s else 0
                signal.setitimer(timer, rest_s, interval_s)
        if _read_directory() != self._directory:
            _write_directory(self._directory)
            return ["working directory"]
        return []

    def close(self) -> None:
        """Closes the copies of files."""
        for copy, _ in self._files:
            with contextlib.suppress(OSError):
                os.close(copy)


_exits: dict[str, Callable[..., Any]] = {}
_stand_ins: list[Callable[..., Any]] = []


def _install_exits() -> None:
    """Replaces functions that end the process at once by ones that raise in a call of ours.

    They stay, as threads may be in calls at once. Elsewhere, and in processes that code has forked,
    they do what they always did.
    """
    for name in ("_exit", "abort", "execv", "execve"):
        if getattr(os, name) not in _stand_ins:
            _exits[name] = getattr(os, name)
            _stand_ins.append(_stand_in(name))
            setattr(os, name, _stand_ins[-1])


def _stand_in(name: str) -> Callable[..., Any]:
    def end(*arguments: Any) -> Any:
        is_of_a_call = threading.get_ident() in _callers or (
            bool(_callers) and threading.current_thread() not in _outsiders
        )
        if is_of_a_call and _getpid() == _undone[0].pid:
            raise SystemExit(f"os.{name}{arguments}")
        return _exits[name](*arguments)

    return end
