"""A host's supervisor: starts its ranks and spares, sees them end, and fences those that are silent.

The first supervisor holds the store and the `Coordinator`; those of other hosts are connected to it
and pass on what their processes say. A process that has ended is seen at once by its descriptor. A
process without heartbeats is killed: a stopped one at the limit, one that still computes at four
times the limit. A supervisor that hears nothing from the first one within the limit kills its
ranks, which have been replaced by then.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from shared.comms.handicap import ISAS
from shared.comms.launch.forking import START_S, Forked, fork
from shared.errors import ConfigError
from swift.membership.channel import ControlChannel
from swift.membership.settings import Launch

__all__ = ["Ended", "Local"]

_ENTRY = "swift.membership.worker"
_MODULES = (
    _ENTRY,
    "torch._dynamo",  # of every optimizer
    "numba",
    "torch.distributed.checkpoint",
    "swift.training.reducer",
    "swift.training.runtime",
)
_MACHINE_CODE = "swift.undo.machine_code"
_FIRST_START_S = 300.0
"""The first process waits for these modules, and on a machine's first run for numba, which compiles kernels."""
_GRACE = 4
"""A process that runs, but has no time for heartbeats, is given this many limits."""


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        rank: its place; None of a spare.
        was_ready: whether it had come to the loop.
        how: in words.
        status: its status if it exited; None if it was killed.
        silent_s: how long it had sent nothing when it was killed for that; else 0.
    """

    rank: int | None
    was_ready: bool
    how: str
    status: int | None
    silent_s: float


@dataclass(slots=True)
class _Child:
    name: str
    rank: int | None
    local_rank: int
    forked: Forked
    channel: ControlChannel
    pidfd: int
    heard_s: float
    is_ready: bool = False
    is_named: bool = False
    new_epoch: int | None = None  # of a world in which it has done no step
    silent_s: float = 0.0  # when it was killed for it


class Local:
    """The processes of this host."""

    def __init__(self, launch: Launch, selector: selectors.BaseSelector) -> None:
        self._launch = launch
        self._selector = selector
        self._children: dict[str, _Child] = {}
        self._count = 0

    def start(self, rank: int | None) -> str:
        """Starts a process and returns its name.

        Raises:
            ConfigError: no process can be started.
            TimeoutError: it takes too long.
        """
        launch = self._launch
        name = f"{launch.host}.{self._count}"
        limit_s = START_S if self._count else _FIRST_START_S
        self._count += 1
        ours, theirs = socket.socketpair()
        local_rank = self._free_place()
        env = {**os.environ, **launch.env}
        env["WORLD_SIZE"] = str(launch.world_size)
        env["GROUP_RANK"] = str(launch.host)
        env["LOCAL_WORLD_SIZE"] = str(len(launch.ranks))
        env["LOCAL_RANK"] = str(local_rank)
        if rank is not None:
            env["RANK"] = str(rank)
        socket.send_fds(ours, [b"o"], [sys.stdout.fileno()])
        modules = [*_MODULES, *launch.preload]
        if not any(name in env for caps in ISAS.values() for name in caps):
            # Else ranks would keep the template's instruction set in place of the one they are given.
            modules.append(_MACHINE_CODE)
        words = [0, -1 if rank is None else rank, launch.world_size, launch.heartbeat_s]
        with theirs:
            forked = fork(
                theirs.fileno(),
                [*words, *launch.script],
                env,
                limit_s,
                cores=os.sched_getaffinity(0),
                modules=modules,
                entry=_ENTRY,
            )
        if forked is None:
            ours.close()
            raise ConfigError(
                "expected to start one more process, got none; free memory, or allow more processes "
                "(ulimit -u, and the container's limit of pids)"
            )
        try:
            pidfd = os.pidfd_open(forked.pid)
        except OSError as error:
            ours.close()
            with suppress(ProcessLookupError):
                os.kill(forked.pid, signal.SIGKILL)
            raise ConfigError(
                f"expected process {forked.pid} to run and to be watched, got {error}; see why it was "
                f"killed (out of memory?), or allow more open files (ulimit -n)"
            ) from error
        channel = ControlChannel(ours)
        child = _Child(name, rank, local_rank, forked, channel, pidfd, time.monotonic())
        self._children[name] = child
        self._selector.register(child.channel, selectors.EVENT_READ, ("says", name))
        self._selector.register(child.pidfd, selectors.EVENT_READ, ("ended", name))
        return name

    def send(self, name: str, message: dict[str, Any]) -> None:
        """Sends a message to a process that may have ended."""
        if name in self._children:
            if message["kind"] in ("world", "interrupt"):
                self._children[name].rank = message["rank"]
                is_world = message["kind"] == "world"
                self._children[name].new_epoch = message["epoch"] if is_world else None
            self._children[name].channel.send(message)

    def receive(self, name: str) -> list[dict[str, Any]]:
        """What a process has said; call it when its channel is readable."""
        child = self._children.get(name)
        if child is None:
            return []
        messages = child.channel.receive()
        if child.channel.is_closed:
            self._selector.unregister(child.channel)  # `ended` follows
        child.heard_s = time.monotonic()
        child.is_ready = child.is_ready or any(one["kind"] == "ready" for one in messages)
        if child.new_epoch in [one.get("epoch") for one in messages if one["kind"] == "beat"]:
            child.new_epoch = None
        return messages

    def is_recovering(self) -> bool:
        """Whether a process of this host has a new world, and has done no step in it."""
        return any(child.new_epoch is not None for child in self._children.values())

    def reap(self, name: str) -> Ended:
        """Forgets a process that has ended."""
        child = self._children.pop(name)
        with suppress(KeyError, ValueError):
            self._selector.unregister(child.channel)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.channel.close()
        code = child.forked.wait()
        how, status = f"ended with status {code}", code
        if code < 0:
            how, status = f"was killed by signal {-code} ({signal.Signals(-code).name})", None
        return Ended(child.rank, child.is_ready, how, status, child.silent_s)

    def _free_place(self) -> int:
        """The least LOCAL_RANK that no process of this host has: ranks come first, spares follow."""
        taken = {child.local_rank for child in self._children.values()}
        return next(place for place in count() if place not in taken)

    def rank_of(self, name: str) -> int | None:
        """The rank of a process; None of a spare."""
        return self._children[name].rank

    def names(self) -> list[str]:
        """Names of the processes that live."""
        return list(self._children)

    def pid_of(self, name: str) -> int:
        """Process id, for signals."""
        return self._children[name].forked.pid

    def next_limit_s(self) -> float:
        """Seconds until a process that stays silent reaches the limit; those beyond it do not count."""
        now = time.monotonic()
        left = [child.heard_s + self._launch.heartbeat_s - now for child in self._children.values()]
        return min((one for one in left if one > 0), default=float("inf"))

    def fence_silent(self) -> None:
        """Kills processes that have sent no heartbeat for too long."""
        now = time.monotonic()
        limit = self._launch.heartbeat_s
        for child in self._children.values():
            silent_s = now - child.heard_s
            if silent_s < limit:
                child.is_named = False
                continue
            if _is_stopped(child.forked.pid) or silent_s > _GRACE * limit:
                child.silent_s = silent_s
                child.forked.kill()
            elif not child.is_named:
                child.is_named = True
                sys.stderr.write(
                    f"meshyard-swift: {_title(child)} runs, but has sent nothing for {silent_s:.1f} s; "
                    f"it is killed after {_GRACE * limit:g} s\n"
                )

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process."""
        self._children[name].forked.send_signal(number)

    def kill_all(self) -> None:
        """Kills all processes and waits for their ends."""
        for child in list(self._children.values()):
            child.forked.kill()
        for name in list(self._children):
            self.reap(name)


def _title(child: _Child) -> str:
    return f"spare {child.name}" if child.rank is None else f"rank {child.rank}"


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
