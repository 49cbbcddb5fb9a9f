"""The loops of supervisors: the first host's, which decides, and the other hosts', which pass on."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from shared.errors import CommError, ConfigError
from shared.process_mark import make_marked_folder, remove_marked_folder, sweep_marked_folders
from swift.membership.channel import ControlChannel
from swift.membership.client import RUN_PREFIX
from swift.membership.coordinator import Coordinator, Process, Say, Settings
from swift.membership.record import FailureRecord
from swift.membership.supervisor import Launch, Local

__all__ = ["First", "Other", "environment", "listen"]

_QUIET_S = 1.0
"""A used spare is replaced this long after, when the recovery is over."""
_STOP_S = 2.0
_CONNECT_S = 5.0
_RETRY_S = 0.5


def environment(*, is_single: bool) -> dict[str, str]:
    """Variables that processes get where the user has not set them: torchrun's thread, and gloo's device."""
    wanted = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if is_single else {})}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def listen(address: str, port: int) -> socket.socket:
    """A listening socket for other supervisors and commands.

    Raises:
        ConfigError: the port is taken, or the address is not this host's.
    """
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise ConfigError(
            f"expected a free port {port} on {address}, got {error.strerror}; another run may have it: "
            f"choose another --master-port on all hosts, or end that run"
        ) from error


class _Loop:
    """What both kinds of supervisor do: watch processes, and keep as many spares as asked for."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.selector = selectors.DefaultSelector()
        self.local = Local(launch, self.selector)
        self.num_spares = launch.num_spares
        self._replace_at = 0.0
        self._woken, self._wakes = socket.socketpair()
        self._interrupted = 0

    def started(self, name: str, rank: int | None) -> None:
        """A process was started."""
        raise NotImplementedError

    def said(self, name: str, message: dict[str, Any]) -> None:
        """A process of this host has said something."""
        raise NotImplementedError

    def gone(self, name: str, how: str, status: int | None) -> None:
        """A process of this host has ended."""
        raise NotImplementedError

    def start_all(self) -> None:
        """Starts this host's processes."""
        for name, rank in self.local.start_all():
            self.started(name, rank)

    def watch(self, handle: Callable[[Any], None]) -> None:
        """Waits for events, at most a fifth of the heartbeat limit, and handles them."""
        if self._interrupted:
            raise KeyboardInterrupt
        for key, _ in self.selector.select(self.launch.heartbeat_s / 5):
            kind, what = key.data
            if kind == "says":
                for message in self.local.receive(what):
                    self.said(what, message)
            elif kind == "ended":
                if what in self.local.names():
                    how, status = self.local.reap(what)
                    self.gone(what, how, status)
            else:
                handle(key)
        self.local.fence_silent()

    def count_spares(self) -> int:
        """Spares of this host that live."""
        return sum(self.local.rank_of(name) is None for name in self.local.names())

    def refill(self, num_waiting: int) -> None:
        """Starts processes until there are as many spares as asked for, or as are waited for."""
        now = time.monotonic()
        missing = max(self.num_spares, num_waiting) - self.count_spares()
        if missing <= 0:
            self._replace_at = now + _QUIET_S
        elif num_waiting or now > self._replace_at:
            for _ in range(missing):
                self.started(self.local.start(None), None)

    def interrupt(self, number: int, frame: object) -> None:
        """Ends the loop: handler of SIGINT and SIGTERM."""
        self._interrupted = number
        self._wakes.send(b"!")

    def __enter__(self) -> Any:
        self.selector.register(self._woken, selectors.EVENT_READ, ("woken", None))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        self.local.kill_all()
        self.selector.close()
        self._woken.close()
        self._wakes.close()


class First(_Loop):
    """The first host's supervisor."""

    def __init__(
        self, launch: Launch, settings: Settings, listener: socket.socket, record: FailureRecord
    ) -> None:
        super().__init__(launch)
        self._listener = listener
        self._record = record
        self._coordinator = Coordinator(settings, store=("", 0))
        self._hosts: dict[int, ControlChannel] = {}  # by host
        self._heard: dict[int, float] = {}
        self._told: set[str] = set()
        self._has_rank_failed = False
        self._can_replace = True
        self._folder = make_marked_folder(_run_parent(), RUN_PREFIX)
        host, port = listener.getsockname()[:2]
        (self._folder / "address").write_text(f"{host}:{port}")

    def run(self, address: str) -> int:
        """Runs until all is done or nothing can be done; returns the exit status.

        Args:
            address: of this host, as the others reach it.
        """
        sweep_marked_folders(_run_parent(), RUN_PREFIX)
        self.selector.register(self._listener, selectors.EVENT_READ, ("accept", None))
        self.start_all()
        from shared.comms.init import open_store  # torch takes seconds, in which processes start

        store = open_store(address, timedelta(minutes=5))
        self._coordinator.store = (address, store.port)
        coordinator = self._coordinator
        last_beat = 0.0
        while coordinator.ended is None:
            self.watch(self._handle)
            self._lose_silent_hosts()
            self._tick()
            if not coordinator.is_released and coordinator.ended is None:
                replaces = self._can_replace and not self._hosts
                self.refill(len(coordinator.lost) if replaces else 0)
            if time.monotonic() - last_beat > self.launch.heartbeat_s / 5:
                last_beat = time.monotonic()
                for channel in self._hosts.values():
                    channel.send({"kind": "beat"})
        return self._finish(coordinator.ended)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for channel in self._hosts.values():
            channel.send({"kind": "end", "status": 1})
            channel.close()
        self._listener.close()
        remove_marked_folder(self._folder)

    def started(self, name: str, rank: int | None) -> None:
        """See `_Loop`."""
        self._coordinator.add(Process(name, self.launch.host, rank))

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `_Loop`."""
        if message["kind"] == "recovery":
            self._record.add(message["record"])
        elif message["kind"] == "failed":
            self._print_failure(name, message["text"])
        else:
            self._deliver(self._coordinator.hear(name, message, time.time()))

    def gone(self, name: str, how: str, status: int | None) -> None:
        """See `_Loop`."""
        rank = self._coordinator.rank_of(name)
        if rank is None and status not in (None, 0):
            self.num_spares -= 1  # refused, or its script fails: the next one would be, too
            self._can_replace = False
            if not self._hosts and not self.count_spares():
                self._coordinator.expect_no_spare()
        self._deliver(self._coordinator.lose([name], how, status, time.time()))
        if rank is not None and self._coordinator.epoch < 0 and status is None:
            self.started(self.local.start(rank), rank)

    def _print_failure(self, name: str, text: str) -> None:
        """Prints why a process fails, unless another has failed alike, or a rank has ended the run."""
        if self._has_rank_failed:
            return
        self._has_rank_failed = self._coordinator.rank_of(name) is not None
        if text not in self._told:
            self._told.add(text)
            sys.stderr.write(text)
            sys.stderr.flush()

    def _finish(self, reason: str) -> int:
        for process in list(self._coordinator.processes):
            self._send(process, {"kind": "stop", "reason": "", "status": 1 if reason else 0})
        deadline = time.monotonic() + _STOP_S
        while self.local.names() and time.monotonic() < deadline:
            self.watch(self._handle)
        for channel in self._hosts.values():
            channel.send({"kind": "end", "status": int(bool(reason))})
            channel.close()
        self._hosts.clear()
        if reason:
            sys.stderr.write(f"meshyard-swift: {reason}\n")
        self._record.finish(reason)
        return int(bool(reason))

    def _deliver(self, says: list[Say]) -> None:
        for name, message in says:
            self._send(name, message)

    def _send(self, name: str, message: dict[str, Any]) -> None:
        host = int(name.split(".")[0])
        if host == self.launch.host:
            self.local.send(name, message)
        elif host in self._hosts:
            self._hosts[host].send({"kind": "to", "name": name, "message": message})

    def _tick(self) -> None:
        before = self._coordinator.num_ranks
        self._deliver(self._coordinator.tick(time.time()))
        if self._coordinator.num_ranks < before:
            sys.stderr.write(
                f"meshyard-swift: no spare came, so training goes on with {self._coordinator.num_ranks} "
                f"ranks in place of {before}, as --min-ranks allows: the result differs from here on\n"
            )

    def _lose_silent_hosts(self) -> None:
        now = time.monotonic()
        for host in [
            h for h, heard in self._heard.items() if now - heard > self.launch.heartbeat_s
        ]:
            self._lose_host(host, "was cut off: its host sent no heartbeat")

    def _lose_host(self, host: int, how: str) -> None:
        channel = self._hosts.pop(host)
        del self._heard[host]
        self.selector.unregister(channel)
        channel.close()
        names = [one.name for one in self._coordinator.processes.values() if one.host == host]
        self._deliver(self._coordinator.lose(names, how, None, time.time()))

    def _handle(self, key: Any) -> None:
        kind, host = key.data
        if kind == "accept":
            channel = ControlChannel.over(self._listener.accept()[0])
            self.selector.register(channel, selectors.EVENT_READ, ("peer", None))
        elif kind == "peer":
            channel = key.fileobj
            for message in channel.receive():
                host = self._hear_peer(channel, host, message)
            if channel.is_closed and channel.fileno() >= 0:
                if host in self._hosts and self._hosts[host] is channel:
                    self._lose_host(host, "ended with its host's supervisor")
                else:
                    self.selector.unregister(channel)
                    channel.close()

    def _hear_peer(
        self, channel: ControlChannel, host: int | None, message: dict[str, Any]
    ) -> int | None:
        if message["kind"] == "hello":
            new: int = message["host"]
            if new in self._hosts:
                self._lose_host(new, "was replaced: its host came back")
            self._hosts[new] = channel
            self.selector.modify(channel, selectors.EVENT_READ, ("peer", new))
            host = new
        elif message["kind"] == "started":
            name, rank = message["name"], message["rank"]
            self._coordinator.add(Process(name, int(name.split(".")[0]), rank))
        elif message["kind"] == "from":
            self.said(message["name"], message["message"])
        elif message["kind"] == "gone":
            how, status = message["how"], message["status"]
            self._deliver(self._coordinator.lose([message["name"]], how, status, time.time()))
        elif message["kind"] == "status":
            channel.send(self._describe())
        elif message["kind"] == "inject":
            channel.send(self._inject(message["fault"], message["rank"], message["seconds"]))
        if host is not None:
            self._heard[host] = time.monotonic()
        return host

    def _describe(self) -> dict[str, Any]:
        return {
            "epoch": self._coordinator.epoch,
            "processes": [
                {
                    "name": one.name,
                    "host": one.host,
                    "rank": one.rank,
                    "step": one.step,
                    "is_ready": one.is_ready,
                }
                for one in self._coordinator.processes.values()
            ],
            "failures": self._record.failures(),
        }

    def _inject(self, fault: str, rank: int, seconds: float) -> dict[str, Any]:
        processes = self._coordinator.processes.values()
        process = next((one for one in processes if one.rank == rank), None)
        if process is None:
            return {"error": f"expected a rank of this run, got {rank}; see meshyard-swift status"}
        if fault == "cut" and process.host == self.launch.host:
            return {
                "error": f"rank {rank} is on the first host, whose supervisor all others need; cut off "
                f"a rank of another host, or stop this one"
            }
        command = {"kind": fault, "name": process.name, "seconds": seconds}
        if process.host == self.launch.host:
            _disturb(self.local, command)
        else:
            self._hosts[process.host].send(command)
        return {"process": process.name}


class Other(_Loop):
    """The supervisor of another host."""

    def __init__(self, launch: Launch, address: tuple[str, int], wait_s: float) -> None:
        super().__init__(launch)
        self._address = address
        self._wait_s = wait_s
        self._channel: ControlChannel | None = None
        self._heard_s = 0.0
        self._status: int | None = None

    def run(self) -> int:
        """Runs until the first supervisor ends; returns the exit status.

        Raises:
            CommError: the first supervisor cannot be reached.
        """
        self._connect()
        self.start_all()
        last_beat = 0.0
        while self._status is None:
            self.watch(self._handle)
            now = time.monotonic()
            if self._status is None and now - self._heard_s > self.launch.heartbeat_s:
                self._fence()
            if self._channel is not None and now - last_beat > self.launch.heartbeat_s / 5:
                last_beat = now
                self._channel.send({"kind": "beat"})
            if self._status is None:
                self.refill(0)
        return self._status

    def started(self, name: str, rank: int | None) -> None:
        """See `_Loop`."""
        self._tell({"kind": "started", "name": name, "rank": rank})

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `_Loop`."""
        self._tell({"kind": "from", "name": name, "message": message})

    def gone(self, name: str, how: str, status: int | None) -> None:
        """See `_Loop`."""
        self._tell({"kind": "gone", "name": name, "how": how, "status": status})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _connect(self) -> None:
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                self._channel = ControlChannel.connect(self._address, _CONNECT_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self._address
                    raise CommError(
                        f"expected the first supervisor at {host}:{port} within {self._wait_s:g} s, "
                        f"got {error}; start it there, with the same --master-port"
                    ) from error
                time.sleep(_RETRY_S)
        self.selector.register(self._channel, selectors.EVENT_READ, ("first", None))
        self._channel.send({"kind": "hello", "host": self.launch.host})
        self._heard_s = time.monotonic() + self._wait_s  # it starts its own processes first

    def _fence(self) -> None:
        """Kills processes that others have replaced, and comes back with spares alone."""
        assert self._channel is not None, "connected when the loop began"
        sys.stderr.write(
            f"meshyard-swift: host {self.launch.host} heard nothing from the first supervisor for "
            f"{self.launch.heartbeat_s:g} s: its ranks are replaced, so they are killed here\n"
        )
        self.selector.unregister(self._channel)
        self._channel.close()
        self.local.kill_all()
        self._connect()
        num_spares = len(self.launch.ranks) + self.launch.num_spares
        self.launch = replace(self.launch, ranks=(), num_spares=num_spares)
        self.num_spares = num_spares
        self.local.relaunch(self.launch)
        self.start_all()

    def _handle(self, key: Any) -> None:
        channel = self._channel
        if key.data[0] != "first" or channel is None:
            return
        for message in channel.receive():
            self._heard_s = time.monotonic()
            if message["kind"] == "to":
                self.local.send(message["name"], message["message"])
            elif message["kind"] == "end":
                self._status = message["status"]
            elif message["kind"] in ("kill", "stop", "cut"):
                _disturb(self.local, message)
        if channel.is_closed and self._status is None:
            sys.stderr.write(
                "meshyard-swift: the first supervisor has ended, and the run with it\n"
            )
            self._status = 1


def _disturb(local: Local, command: dict[str, Any]) -> None:
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


def _run_parent() -> Path:
    return Path(tempfile.gettempdir())
