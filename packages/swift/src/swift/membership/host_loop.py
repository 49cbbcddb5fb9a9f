"""What every host's supervisor does: watch processes, and keep as many spares as asked for."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import ConfigError
from swift.membership.settings import Launch
from swift.membership.supervisor import Ended, Local

__all__ = ["HostLoop", "delay_s", "disturb", "environment"]

_LOOK_S = 0.05
"""Time passes in steps of this at most."""
_QUIET_S = 1.0
"""A used spare is replaced this long after at the earliest."""
_LONGEST_WAIT_S = 10.0
"""It waits for the end of the recovery, whose cores a script that starts would take; this long at most."""
_AGAIN_S = 0.1
_MOST_DOUBLED = 8
_MOST_KILLED = 5
"""Spares in a row that are killed before they are ready, behind which no more are started."""


def delay_s(num_before: int) -> float:
    """Seconds to wait before a process is started again: none at first, then ever more."""
    return _AGAIN_S * (2**num_before - 1)


def environment(*, is_single: bool) -> dict[str, str]:
    """Variables that processes get where the user has not set them.

    torchrun's one thread; of torch's C++ log no warnings of connections that end, which a recovery ends
    itself; on a single host gloo's device.
    """
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if is_single:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class HostLoop:
    """The loop that the first host's supervisor and those of others share."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.selector = selectors.DefaultSelector()
        self.local = Local(launch, self.selector)
        self.num_spares = launch.num_spares
        self.can_replace = True
        """Whether a process that is started would become a spare, for all that is known."""
        self._num_killed = self._num_unstarted = 0
        self._full_at = 0.0
        self._again_at = 0.0
        self._woken, self._wakes = socket.socketpair()
        self._interrupted = 0
        self._handlers: dict[int, Any] = {}

    def started(self, name: str, rank: int | None) -> None:
        """A process was started."""
        raise NotImplementedError

    def said(self, name: str, message: dict[str, Any]) -> None:
        """A process of this host has said something."""
        raise NotImplementedError

    def gone(self, name: str, ended: Ended) -> None:
        """A process of this host has ended."""
        raise NotImplementedError

    def start(self, rank: int | None) -> None:
        """Starts a process."""
        self.started(self.local.start(rank), rank)

    def start_all(self, ranks: Sequence[int]) -> None:
        """Starts this host's processes: ranks, then spares."""
        for rank in [*ranks, *[None] * self.num_spares]:
            self.start(rank)

    def watch(self, handle: Callable[[Any], None]) -> None:
        """Waits for events, not for long, and handles them; kills processes that are silent."""
        self.check_interrupted()
        for key, _ in self.selector.select(min(_LOOK_S, self.next_limit_s())):
            kind, what = key.data
            if kind == "says":
                for message in self.local.receive(what):
                    if message["kind"] == "ready":
                        self._num_killed = 0
                    self.said(what, message)
            elif kind == "ended":
                if what in self.local.names():
                    ended = self.local.reap(what)
                    if ended.rank is None:
                        self._lose_spare(ended)
                    self.gone(what, ended)
            else:
                handle(key)
        self.local.fence_silent()

    def next_limit_s(self) -> float:
        """Seconds until somebody who stays silent may be lost."""
        return self.local.next_limit_s()

    def count_spares(self) -> int:
        """Spares of this host that live."""
        return sum(self.local.rank_of(name) is None for name in self.local.names())

    def refill(self, num_waiting: int) -> None:
        """Starts processes until there are as many spares as asked for, or as are waited for."""
        now = time.monotonic()
        missing = max(self.num_spares, num_waiting) - self.count_spares()
        if missing <= 0:
            self._full_at = now
            return
        missing_s = now - self._full_at
        waits = missing_s < _QUIET_S or (missing_s < _LONGEST_WAIT_S and self.local.is_recovering())
        if now > self._again_at and (num_waiting or not waits):
            for _ in range(missing):
                if not self._try_to_start_spare():
                    break

    def _try_to_start_spare(self) -> bool:
        """Starts one, or says once why it cannot be, which is no reason to end ranks that train."""
        try:
            self.start(None)
        except (ConfigError, OSError) as error:
            if not self._num_unstarted:
                sys.stderr.write(
                    f"meshyard-swift: host {self.launch.host} can start no spare, and will try again: {error}\n"
                )
            self._num_unstarted += 1
            self._again_at = time.monotonic() + delay_s(min(self._num_unstarted, _MOST_DOUBLED))
            return False
        self._num_unstarted = 0
        return True

    def _lose_spare(self, ended: Ended) -> None:
        """Starts fewer spares where they fail, and later ones where they are killed before they are ready."""
        if ended.status is None and not ended.was_ready:
            self._num_killed += 1
            self._again_at = time.monotonic() + delay_s(self._num_killed)
        # Refused, or its script fails: so would the next.
        has_failed = ended.status not in (None, 0)
        if has_failed or self._num_killed > _MOST_KILLED:
            self.num_spares -= 1
            self.can_replace = False
        if self._num_killed == _MOST_KILLED + 1:
            sys.stderr.write(
                f"meshyard-swift: {self._num_killed} spares of host {self.launch.host} in a row were "
                f"lost before they were ready, the last one {ended.how}; no more are started\n"
            )

    def interrupt(self, number: int, frame: object) -> None:
        """Ends the loop: handler of SIGINT, SIGTERM and SIGHUP."""
        self._interrupted = number
        self._wakes.send(b"!")

    def check_interrupted(self) -> None:
        """Raises KeyboardInterrupt behind one of these signals."""
        if self._interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> Any:
        self.selector.register(self._woken, selectors.EVENT_READ, ("woken", None))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has SIGHUP ignored, so that a run goes on when its terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self.interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        self.local.kill_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.selector.close()
        self._woken.close()
        self._wakes.close()


def disturb(local: Local, command: dict[str, Any]) -> None:
    """Kills or stops a process of this host, or cuts the host off, as `meshyard-swift inject` asks."""
    if command["kind"] == "cut":
        _cut(command["seconds"])
    elif command["name"] in local.names():
        number = signal.SIGKILL if command["kind"] == "kill" else signal.SIGSTOP
        local.signal(command["name"], number)


def _cut(seconds: float) -> None:
    """Takes this host's link down, and up again later."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "")

    def set_link(state: str) -> None:
        subprocess.run(["ip", "link", "set", "dev", device, state], check=False, timeout=10)

    set_link("down")
    timer = threading.Timer(seconds, set_link, ["up"])
    timer.daemon = True
    timer.start()
