"""Ranks as processes of this machine: started once, then running one function after another.

Functions are sent as (module, file, qualified name), so that they may be defined in a test, a
benchmark or an installed module. A rank that raises, dies or hangs ends the pool: the others get a
short grace period to report their errors, then they are stopped, and the parent raises one
RankFailure with all reports. A rank never outlives its parent (see `rank`). If possible, a rank is
forked from a process that has imported torch already (see `forking`).
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.comms.handicap import read_words
from shared.comms.launch.forking import Forked, fork
from shared.comms.launch.shipping import shipped
from shared.errors import ConfigError, RankFailure
from shared.process_mark import (
    make_marked_folder,
    remove_marked_folder,
    sweep_marked_folders,
)
from shared.training.log_lines import list_shown

__all__ = ["GRACE_S", "KEEP_MEMORY", "RankPool", "RunResult"]

_FOLDER = "meshyard-ranks-"

# How long ranks may take to report, or to stop, once one has failed or the pool is closed.
GRACE_S = 2.0

# How long a rank may take to write its stack, and how its end is found.
_STACKS_S, _LOOK_S, _MOST_LOOKS = 10.0, 0.05, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Return value and duration of a function on each rank.

    Attributes:
        results: return values, by rank.
        seconds: time spent in the function, which starts after a barrier, by rank.
    """

    results: list[Any]
    seconds: list[float]

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """How one rank ended; the report of lowest `order` is taken as the cause of a failed run."""

    rank: int
    order: int
    text: str
    mistake: str | None = None


_DIED, _RAISED, _COMM_ERROR, _HUNG = range(4)

# A tensor of many megabytes that malloc maps and unmaps in each operation costs more in page faults
# than in arithmetic (a ReLU of 25 MB: 15 to 24 ms, without them 2). With these, malloc keeps freed
# memory and torch asks for huge pages. Both read the environment once, when the process starts.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**31),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "THP_MEM_ALLOC_ENABLE": "1",
}


class RankPool:
    """gloo ranks on this machine, as a context manager.

    After a failed run the pool is closed; open another.

    Example:
        >>> from datetime import timedelta
        >>> import math
        >>> with RankPool(2, timeout=timedelta(seconds=60)) as pool:
        ...     pool.run(math.sqrt, 16.0).results
        [4.0, 4.0]
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        timeout: timedelta = timedelta(seconds=120),
        threads_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[Sequence[str]] | None = None,
        ranks_per_host: int | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """Describe the pool; ranks start on entry.

        Args:
            num_ranks: number of processes.
            timeout: how long the start may take, each run that is given no timeout, and each
                message between ranks.
            threads_per_rank: threads that torch and numba use in each rank.
            env: environment variables that override the parent's in every rank; the ranks are
                fresh processes then, as libraries read variables when they are loaded.
            prefix: for each rank the words before its command, as ["ip", "netns", "exec", "a"];
                the prefix must exec the command, not run it as a child. Of a prefix that says no more
                than `handicap(isa=, cores=)` the rank gets environment and cores without a command.
            ranks_per_host: value of LOCAL_WORLD_SIZE, which groups consecutive ranks into hosts;
                all ranks by default.
            modules: what ranks import as they start; once for all of them where they are the first to
                be forked. They must run no kernels and start no threads as they are imported.

        Raises:
            ConfigError: if a number is below one or there is not one prefix for each rank.
        """
        ranks_per_host = num_ranks if ranks_per_host is None else ranks_per_host
        if num_ranks < 1 or threads_per_rank < 1 or ranks_per_host < 1:
            raise ConfigError(
                f"a pool needs at least one rank, one thread a rank and one rank a host, got "
                f"{num_ranks}, {threads_per_rank} and {ranks_per_host}"
            )
        if prefix is not None and len(prefix) != num_ranks:
            raise ConfigError(f"{num_ranks} ranks need as many prefixes, got {len(prefix)}")
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._threads = threads_per_rank
        self._ranks_per_host = ranks_per_host
        self._env = dict(env or {})
        self._prefix = [list(words) for words in prefix] if prefix else [[]] * num_ranks
        self._modules = tuple(modules)
        self._handicaps = [read_words(words) for words in self._prefix]
        # A template for a custom environment would serve no other pool.
        self._may_fork = None not in self._handicaps and not env
        if sys.platform == "linux" and None not in self._handicaps:
            # By default gloo uses the hostname's address, which may belong to no interface here.
            self._env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._controls: list[Connection] = []
        self._folder: Path | None = None
        self._is_open = False

    def __enter__(self) -> RankPool:
        sweep_marked_folders(tempfile.gettempdir(), _FOLDER)
        self._folder = make_marked_folder(tempfile.gettempdir(), _FOLDER)
        try:
            for rank in range(self.num_ranks):
                self._start(rank, self._folder)
            self._collect("starting", self.timeout)
        except BaseException:
            self._stop(0.0)
            raise
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_open:
            for control in self._controls:
                with suppress(OSError):
                    control.send(("stop",))
        self._stop(GRACE_S if self._is_open else 0.0)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return [process.pid for process in self._processes]

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code, negative for the number of a fatal signal; None while it runs."""
        return self._processes[rank].poll()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: timedelta | None = None
    ) -> RunResult:
        """Call a function on every rank and collect the return values.

        torch.distributed is initialised, so the function may use `Group.world()`; a barrier
        precedes the call.

        Args:
            function: function defined at the top level of a file.
            *args: its arguments, the same on each rank; pickled.
            timeout: how long the run may take; the pool's by default.

        Returns:
            Results and seconds by rank.

        Raises:
            ConfigError: if the pool is closed or the function or its arguments cannot be shipped.
            RankFailure: if a rank raised, died or did not finish in time; the message has its
                traceback and the other ranks' reports. The pool is closed then.
        """
        if not self._is_open:
            raise ConfigError(
                "this pool is closed, by a failed run or because its `with` block was left or "
                "never entered; open another"
            )
        name, file, qualname = shipped(function)
        try:
            payload = pickle.dumps(args, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ConfigError(
                f"the arguments of {qualname} cannot be pickled ({error}); pass tensors and plain "
                f"data, and create other objects in the rank"
            ) from error
        self._is_open = False
        try:
            for control in self._controls:
                # A rank that died since the last run is detected by its closed connection below.
                with suppress(OSError):
                    control.send(("run", name, file, qualname, payload))
            messages = self._collect(f"running {qualname}", timeout or self.timeout)
            results = [_unpickled(rank, data) for rank, (_, _, data) in enumerate(messages)]
        except BaseException:
            self._stop(0.0)
            raise
        self._is_open = True
        return RunResult(results=results, seconds=[seconds for _, seconds, _ in messages])

    def _start(self, rank: int, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        args = (
            *(theirs.fileno(), rank, self.num_ranks, self._threads),
            *(
                self.timeout.total_seconds(),
                folder,
                ",".join(list_shown()),
                ",".join(self._modules),
            ),
        )
        env = {
            **KEEP_MEMORY,
            **os.environ,
            # A rank can import what the parent can; `-P` keeps its start folder off sys.path.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "NUMBA_NUM_THREADS": str(self._threads),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank % self._ranks_per_host),
            "LOCAL_WORLD_SIZE": str(min(self._ranks_per_host, self.num_ranks)),
            **self._env,
        }
        with theirs:
            forked = None
            handicap = self._handicaps[rank]
            if self._may_fork and handicap is not None:
                try:
                    forked = fork(
                        theirs.fileno(), args, env | handicap[0], self.timeout.total_seconds(),
                        cores=handicap[1] or os.sched_getaffinity(0), modules=self._modules,
                    )  # fmt: skip
                except TimeoutError as error:
                    raise RankFailure(
                        f"rank {rank} of {self.num_ranks} failed starting: {error}", rank=rank
                    ) from error
                self._may_fork = forked is not None
            self._processes.append(forked or self._fresh(rank, args, env))
        self._controls.append(Connection(ours.detach()))

    def _fresh(self, rank: int, args: tuple, env: dict[str, str]) -> subprocess.Popen[bytes]:
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (os.getpid(), int(is_main_thread), *args)
        return subprocess.Popen(
            [
                *self._prefix[rank],
                *(sys.executable, "-P", "-m", "shared.comms.launch.rank"),
                *(str(number) for number in numbers),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is reserved for the parent's own results
            pass_fds=[args[0]],
            start_new_session=True,  # so that a rank's own children can be stopped too
        )

    def _collect(self, doing: str, timeout: timedelta) -> list[tuple]:
        """One message from each rank; raises a RankFailure if a rank failed or did not answer."""
        deadline = time.monotonic() + timeout.total_seconds()
        messages: dict[int, tuple] = {}
        reports: list[_Report] = []
        waiting = {control: rank for rank, control in enumerate(self._controls)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for control in ready:
                assert isinstance(control, Connection)
                rank = waiting.pop(control)
                try:
                    message = control.recv()
                except (EOFError, OSError):
                    reports.append(self._death(rank))
                else:
                    if message[0] == "error":
                        order = _COMM_ERROR if message[1] == "CommError" else _RAISED
                        text, mistake = message[2:]
                        report = _Report(rank=rank, order=order, text=text, mistake=mistake)
                        reports.append(report)
                    else:
                        messages[rank] = message
            if reports:
                deadline = min(deadline, time.monotonic() + GRACE_S)
                self._tell_of_deaths(reports, list(waiting))
        hung = self._stacks(list(waiting.values()))
        limit = "after another rank failed" if reports else f"within {timeout.total_seconds():g} s"
        for rank, stack in hung.items():
            text = f"did not finish {doing} {limit}; it was stopped here:\n{stack}"
            reports.append(_Report(rank=rank, order=_HUNG, text=text))
        if reports:
            raise self._failure(doing, reports)
        return [messages[rank] for rank in range(self.num_ranks)]

    def _tell_of_deaths(self, reports: list[_Report], waiting: list[Connection]) -> None:
        # A rank blocked on sending to the dead one would otherwise wait for the timeout.
        for control in waiting:
            for report in reports:
                with suppress(OSError):
                    control.send(("died", report.rank))

    def _death(self, rank: int) -> _Report:
        process = self._processes[rank]
        try:
            code = process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            how = "closed its control connection"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return _Report(rank=rank, order=_DIED, text=how)

    def _failure(self, doing: str, reports: list[_Report]) -> RankFailure:
        cause, *others = sorted(reports, key=lambda report: report.order)
        lines = [f"rank {cause.rank} of {self.num_ranks} failed {doing}: {cause.text}"]
        lines += [f"\nrank {other.rank} of {self.num_ranks}: {other.text}" for other in others]
        return RankFailure("\n".join(lines), rank=cause.rank, mistake=cause.mistake)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Stacks of ranks that did not answer; faulthandler writes them on a signal."""
        stacks = dict.fromkeys(ranks, "(no stack: it does not answer signals)")
        assert self._folder is not None, "ranks run, so their folder was made"
        files = {rank: self._folder / f"stack-{rank}" for rank in ranks}
        for rank, file in list(files.items()):
            # Without the file the handler is not registered yet and the signal would kill the rank.
            if file.exists() and self._processes[rank].poll() is None:
                self._processes[rank].send_signal(signal.SIGUSR1)
            else:
                del files[rank]
        num_looks = dict.fromkeys(files, 0)
        deadline = time.monotonic() + _STACKS_S
        while files and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            for rank, file in list(files.items()):
                text = file.read_text().rstrip()
                if not text:
                    continue
                num_looks[rank] = num_looks[rank] + 1 if text == stacks[rank] else 0
                stacks[rank] = text
                # Written piece by piece: the file is complete when it has not grown for some looks.
                if num_looks[rank] == _MOST_LOOKS:
                    del files[rank]
        return stacks

    def _stop(self, grace_s: float) -> None:
        """End every rank and remove the pool's folder; ranks get `grace_s` to end by themselves."""
        self._is_open = False
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            # A rank leads a process group, which may have members after the rank's own end. The
            # template kills a forked rank's group at its end, after which the id may be reused.
            if not isinstance(process, Forked) or process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not lead a process group yet
            process.wait()
        for control in self._controls:
            control.close()
        self._processes, self._controls = [], []
        if self._folder is not None:
            remove_marked_folder(self._folder)
            self._folder = None


def _unpickled(rank: int, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RankFailure(
            f"the result of rank {rank} cannot be unpickled here ({type(error).__name__}: "
            f"{error}); return tensors and plain data",
            rank=rank,
        ) from error
