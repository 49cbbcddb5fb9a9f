"""The first host's supervisor: it decides, and tells the others."""

from __future__ import annotations

import selectors
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.process_mark import make_marked_folder, remove_marked_folder, sweep_marked_folders
from swift.membership.channel import ControlChannel
from swift.membership.client import RUN_PREFIX
from swift.membership.coordinator import Coordinator, Process, Say, Settings
from swift.membership.host_loop import HostLoop, disturb
from swift.membership.record import FailureRecord
from swift.membership.supervisor import Launch

__all__ = ["FirstHost", "listen"]

_STOP_S = 2.0


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


class FirstHost(HostLoop):
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
        self._num_ranks = settings.num_ranks
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
            self._deliver(coordinator.tick(time.time()))
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
        """See `HostLoop`."""
        self._coordinator.add(Process(name, self.launch.host, rank))

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `HostLoop`."""
        if message["kind"] == "recovery":
            self._record.add(message["record"])
        elif message["kind"] == "failed":
            self._print_failure(name, message["text"])
        else:
            self._deliver(self._coordinator.hear(name, message, time.time()))

    def gone(self, name: str, how: str, status: int | None) -> None:
        """See `HostLoop`."""
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
        if says:
            self._tell_losses(says[0].message)

    def _tell_losses(self, message: dict[str, Any]) -> None:
        """Prints which ranks are lost, and what is done about it."""
        lost = message.get("lost", self._coordinator.lost)
        if message["kind"] == "interrupt":
            limit_s = self._coordinator.settings.wait_s
            what = f"the others wait for a spare, {limit_s:g} s at most"
        elif message["kind"] == "world" and message["world_size"] == self._num_ranks:
            what = "a spare takes the place"
        elif message["kind"] == "world":
            what = (
                f"training goes on with {message['world_size']} ranks in place of {self._num_ranks}, as "
                f"--min-ranks allows: the result differs from here on"
            )
            self._num_ranks = message["world_size"]
        else:
            return
        if lost:
            told = ", ".join(f"rank {one['rank']} {one['how']}" for one in lost)
            sys.stderr.write(f"meshyard-swift: {told}; {what}\n")

    def _send(self, name: str, message: dict[str, Any]) -> None:
        host = int(name.split(".")[0])
        if host == self.launch.host:
            self.local.send(name, message)
        elif host in self._hosts:
            self._hosts[host].send({"kind": "to", "name": name, "message": message})

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
            disturb(self.local, command)
        else:
            self._hosts[process.host].send(command)
        return {"process": process.name}


def _run_parent() -> Path:
    return Path(tempfile.gettempdir())
