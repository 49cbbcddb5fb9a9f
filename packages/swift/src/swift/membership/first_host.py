"""The first host's supervisor: it decides, and tells the others."""

from __future__ import annotations

import selectors
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.process_mark import make_marked_folder, remove_marked_folder, sweep_marked_folders
from swift.membership.channel import ControlChannel, is_known
from swift.membership.client import RUN_PREFIX
from swift.membership.coordinator import Coordinator, Process, Say
from swift.membership.host_loop import HostLoop, delay_s, disturb
from swift.membership.record import FailureRecord
from swift.membership.settings import Launch, Settings
from swift.membership.supervisor import Ended

__all__ = ["FirstHost", "listen"]

_STOP_S = 2.0
_NAME_MISSING = 0.1
"""Of `--wait`: behind it, hosts that have not come are named, once."""


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


@dataclass(slots=True)
class _Host:
    """Another host: its supervisor's connection and start, and when it was heard last."""

    channel: ControlChannel
    start: str
    heard_s: float


class FirstHost(HostLoop):
    """The first host's supervisor."""

    def __init__(
        self, launch: Launch, settings: Settings, listener: socket.socket, record: FailureRecord
    ) -> None:
        super().__init__(launch)
        self._listener = listener
        self._record = record
        self._coordinator = Coordinator(settings, store=("", 0))
        self._hosts: dict[int, _Host] = {}
        self._restarts: dict[int, tuple[int, float]] = {}  # by rank: its host, and when to start it
        self._told: set[str] = set()
        self._lost_spares: list[dict[str, Any]] = []
        self._num_spares_told = 0
        self._has_rank_failed = False
        self._name_missing_at = 0.0
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
        self.start_all(self.launch.ranks)
        from shared.comms.init import open_store  # torch takes seconds, in which processes start

        store = open_store(address, timedelta(minutes=5))
        self._coordinator.store = (address, store.port)
        coordinator = self._coordinator
        self._name_missing_at = time.monotonic() + _NAME_MISSING * coordinator.settings.wait_s
        last_beat = 0.0
        while coordinator.ended is None:
            self.watch(self._handle)
            self._lose_silent_hosts()
            self._name_missing_hosts()
            self._deliver(coordinator.tick(time.monotonic()))
            self._tell_lost_spares()
            self._start_again()
            if not coordinator.is_released and coordinator.ended is None:
                replaces = self.can_replace and not self._hosts and coordinator.epoch >= 0
                self.refill(len(coordinator.lost) if replaces else 0)
            if time.monotonic() - last_beat > self.launch.heartbeat_s / 5:
                last_beat = time.monotonic()
                for host in self._hosts.values():
                    host.channel.send({"kind": "beat"})
        return self._finish(coordinator.ended)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._end_hosts(1)
        self._listener.close()
        remove_marked_folder(self._folder)

    def next_limit_s(self) -> float:
        """See `HostLoop`."""
        now = time.monotonic()
        left = [one.heard_s + self.launch.heartbeat_s - now for one in self._hosts.values()]
        return min([super().next_limit_s(), *(one for one in left if one > 0)])

    def started(self, name: str, rank: int | None) -> None:
        """See `HostLoop`."""
        self._coordinator.add(Process(name, self.launch.host, rank))

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `HostLoop`."""
        if message["kind"] == "recovery":
            # A rank may have come to its step as the next loss was told with this one's.
            if message["record"]["epoch"] not in self._coordinator.continued:
                self._record.add(message["record"])
        elif message["kind"] == "failed":
            self._print_failure(name, message["text"])
        else:
            self._deliver(self._coordinator.hear(name, message, time.monotonic()))

    def gone(self, name: str, ended: Ended) -> None:
        """See `HostLoop`."""
        if not self.can_replace and not self._hosts and not self.count_spares():
            self._coordinator.expect_no_spare()
        if ended.rank is None:
            self._note_lost_spare(self.launch.host, ended.how)
        self._lose([name], ended.how, ended.status, ended.silent_s)

    def _note_lost_spare(self, host: int, how: str) -> None:
        if not self._coordinator.is_released:  # then spares are told to end
            self._lost_spares.append({"host": host, "how": how})

    def _tell_lost_spares(self) -> None:
        """Prints which spares have ended, once ranks train: before, the run may end for the same reason."""
        if self._coordinator.epoch < 0 or self._coordinator.ended is not None:
            return
        num_left = sum(one.rank is None for one in self._coordinator.processes.values())
        for spare in self._lost_spares[self._num_spares_told :]:
            left = (
                f"{num_left} left" if num_left else "no spare is left to take a lost rank's place"
            )
            sys.stderr.write(
                f"meshyard-swift: a spare of host {spare['host']} {spare['how']}; {left}\n"
            )
        self._num_spares_told = len(self._lost_spares)

    def _lose(self, names: list[str], how: str, status: int | None, silent_s: float) -> None:
        """Has lost ranks replaced, and before the first world started again."""
        coordinator, now = self._coordinator, time.monotonic()
        known = [coordinator.processes[name] for name in names if name in coordinator.processes]
        self._deliver(coordinator.lose(names, how, status, now, silent_s))
        if coordinator.epoch >= 0 or coordinator.ended is not None:
            return
        for one in known:
            if one.rank is not None:
                self._restarts[one.rank] = (one.host, now + delay_s(coordinator.num_losses - 1))
                sys.stderr.write(
                    f"meshyard-swift: rank {one.rank} {how} before the first step; it is started again\n"
                )

    def _start_again(self) -> None:
        """Starts ranks that were lost before the first world, where their hosts are there."""
        now = time.monotonic()
        for rank, (host, at) in list(self._restarts.items()):
            if now < at or host not in (self.launch.host, *self._hosts):
                continue
            del self._restarts[rank]
            if host == self.launch.host:
                self.start(rank)
            else:
                self._hosts[host].channel.send({"kind": "start", "rank": rank})

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
        self._end_hosts(int(bool(reason)))
        if reason:
            sys.stderr.write(f"meshyard-swift: {reason}\n")
        self._record.finish(reason)
        return int(bool(reason))

    def _end_hosts(self, status: int) -> None:
        for host in self._hosts.values():
            host.channel.send({"kind": "end", "status": status})
            host.channel.close()
        self._hosts.clear()

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
            self._hosts[host].channel.send({"kind": "to", "name": name, "message": message})

    def _name_missing_hosts(self) -> None:
        if self._coordinator.epoch >= 0 or time.monotonic() < self._name_missing_at:
            return
        self._name_missing_at = float("inf")
        num_hosts = self.launch.world_size // len(self.launch.ranks)
        missing = [str(host) for host in range(1, num_hosts) if host not in self._hosts]
        if missing:
            sys.stderr.write(
                f"meshyard-swift: the first step waits for hosts that have not come: {', '.join(missing)} "
                f"of 0 to {num_hosts - 1}; start each with its --node-rank and this host's --master-addr\n"
            )

    def _lose_silent_hosts(self) -> None:
        now = time.monotonic()
        for number, host in list(self._hosts.items()):
            silent_s = now - host.heard_s
            if silent_s > self.launch.heartbeat_s:
                _send_fence(host.channel)  # one that was stopped reads it when it goes on
                self._lose_host(number, "was cut off: its host sent no heartbeat", silent_s)

    def _lose_host(self, number: int, how: str, silent_s: float = 0.0) -> None:
        host = self._hosts.pop(number)
        self.selector.unregister(host.channel)
        host.channel.close()
        coordinator = self._coordinator
        names = [one.name for one in coordinator.processes.values() if one.host == number]
        self._lose(names, how, None, silent_s)
        if coordinator.epoch < 0:  # it may not have read which ones to start again
            self._restarts |= {
                one["rank"]: (number, 0.0) for one in coordinator.lost if one["host"] == number
            }

    def _handle(self, key: Any) -> None:
        kind, host = key.data
        if kind == "accept":
            channel = ControlChannel.over(self._listener.accept()[0])
            self.selector.register(channel, selectors.EVENT_READ, ("peer", None))
        elif kind == "peer":
            channel = key.fileobj
            for message in channel.receive():
                if not is_known(message):
                    channel.is_closed = True
                    break
                host = self._hear_peer(channel, host, message)
            if channel.is_closed and channel.fileno() >= 0:
                if host in self._hosts and self._hosts[host].channel is channel:
                    self._lose_host(host, "ended with its host's supervisor")
                else:
                    self.selector.unregister(channel)
                    channel.close()

    def _hear_peer(
        self, channel: ControlChannel, host: int | None, message: dict[str, Any]
    ) -> int | None:
        if message["kind"] == "hello":
            host = self._welcome(channel, message)
        elif message["kind"] == "started" and host is not None:
            self._coordinator.add(Process(message["name"], host, message["rank"]))
        elif message["kind"] == "from" and host is not None:
            self.said(message["name"], message["message"])
        elif message["kind"] == "gone" and host is not None:
            told = message["how"], message["status"], message["silent_s"]
            process = self._coordinator.processes.get(message["name"])
            if process is not None and process.rank is None:
                self._note_lost_spare(host, message["how"])
            self._lose([message["name"]], *told)
        elif message["kind"] == "status":
            channel.send(self._describe())
        elif message["kind"] == "inject":
            channel.send(self._inject(message["fault"], message["rank"], message["seconds"]))
        if message["kind"] != "hello" and host is not None and host in self._hosts:
            self._hosts[host].heard_s = time.monotonic()
        return host

    def _welcome(self, channel: ControlChannel, hello: dict[str, Any]) -> int | None:
        """Takes another host in; None if it cannot be one, or must come back without ranks."""
        host = hello["host"]
        if why := self._unlike(hello):
            channel.send({"kind": "refuse", "reason": why})
            return None
        if hello["starts"] and self._coordinator.epoch >= 0:
            _send_fence(channel)
            return None
        if host in self._hosts:
            self._lose_host(host, "was replaced: its host came back")
        for rank in hello["starts"]:
            self._restarts.pop(rank, None)
        # It starts its first process before it is heard again, for which modules are imported.
        heard_s = time.monotonic() + self._coordinator.settings.wait_s
        self._hosts[host] = _Host(channel, hello["start"], heard_s)
        self.selector.modify(channel, selectors.EVENT_READ, ("peer", host))
        return host

    def _unlike(self, hello: dict[str, Any]) -> str:
        """Why another supervisor cannot be of this run; "" if it can."""
        host, ours = hello["host"], self.launch
        num_hosts = ours.world_size // len(ours.ranks)
        wanted = (len(ours.ranks), ours.world_size, ours.heartbeat_s)
        given = (hello["num_ranks"], hello["world_size"], hello["heartbeat_s"])
        if given != wanted:
            theirs, first = (
                f"-n {one[0]}, {one[1]} ranks in all and --heartbeat {one[2]:g}"
                for one in (given, wanted)
            )
            return (
                f"host {host}: expected {first}, as the first host has, got {theirs}; start it with "
                f"the same -n, --nnodes and --heartbeat"
            )
        there = self._hosts.get(host)
        if not 0 < host < num_hosts or (there is not None and there.start != hello["start"]):
            return (
                f"host {host}: expected a --node-rank of its own, 1 to {num_hosts - 1}, got one that "
                f"another host has; give each host its own"
            )
        return ""

    def _describe(self) -> dict[str, Any]:
        return {
            "epoch": self._coordinator.epoch,
            "num_recoveries": self._coordinator.num_recoveries,
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
            "lost_spares": self._lost_spares,
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
            self._hosts[process.host].channel.send(command)
        return {"process": process.name}


def _send_fence(channel: ControlChannel) -> None:
    why = "is told that the run goes on without its ranks: they are killed here, and spares started"
    channel.send({"kind": "fence", "why": why})


def _run_parent() -> Path:
    return Path(tempfile.gettempdir())
