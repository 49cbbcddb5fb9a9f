"""Hosts and a slow network on one machine: network namespaces joined by rate-limited links.

Each host is a namespace with one Ethernet device, `veth0`, attached to a bridge in a namespace of
its own. One token bucket limits the device's sending side and another the bridge's port towards it,
so that two hosts sending to a third share its link, as on a switch. Ranks in the hosts use real
TCP, have a /dev/shm per host, and the kernel counts their bytes. This needs Linux, root, `ip` and
`tc`; the machine's own network is not touched.

The names of a lab's namespaces and folders carry a process mark, so that the next lab can remove
leftovers of killed processes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.comms.launch import RankPool
from shared.errors import ConfigError, TopologyError
from shared.process_mark import is_alive, mark
from shared.units import parse_rate

__all__ = ["HostCounters", "NetLab", "NetLabUnavailable", "available", "lab_names", "sweep"]

_log = logging.getLogger(__name__)

_PREFIX = "meshyard-lab-"
_SHM = Path("/dev/shm")
_DEVICE = "veth0"
# Two bursts of 64 KiB are the largest jump over the rate; tc's kb are KiB.
_BURST = "64kb"
# A packet queued at a link for longer is dropped, as by a switch with small buffers.
_QUEUE = "50ms"
# TCP may give the device several frames as one segment of up to this size. The token buckets count
# each frame's headers but pass the segment whole; segmenting larger ones takes a core at 1 Gbit/s.
_SEGMENT = "16384"
_labs = itertools.count()

# Started in the host's namespace; a mount there is seen by this process and its children only.
_IN_HOST = 'mount --bind "$0" /dev/shm && exec "$@"'


class NetLabUnavailable(TopologyError):
    """Network namespaces cannot be built here; the message says what is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCounters:
    """Bytes and frames that a host's Ethernet device carried, from /proc/net/dev.

    Attributes:
        tx_bytes: bytes sent, including each frame's Ethernet (14 bytes), IP and TCP headers
            (together 66 bytes for a TCP segment with timestamps).
        rx_bytes: bytes received, counted the same way.
        tx_frames: frames sent.
        rx_frames: frames received.
    """

    tx_bytes: int
    rx_bytes: int
    tx_frames: int
    rx_frames: int

    def diff(self, earlier: HostCounters) -> HostCounters:
        """Bytes and frames carried since `earlier`."""
        return HostCounters(
            tx_bytes=self.tx_bytes - earlier.tx_bytes,
            rx_bytes=self.rx_bytes - earlier.rx_bytes,
            tx_frames=self.tx_frames - earlier.tx_frames,
            rx_frames=self.rx_frames - earlier.rx_frames,
        )


class NetLab:
    """Emulated hosts on rate-limited links, as a context manager.

    Example::

        with NetLab(hosts=2, rate="100mbit") as lab, lab.pool() as pool:
            pool.run(step)
            print(lab.counters())

    Raises:
        NetLabUnavailable: on entry: this machine cannot make network namespaces.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str = "100mbit",
        ranks_per_host: int = 1,
        delay: str | None = None,
    ) -> None:
        """Describe the lab; namespaces are made on entry.

        Args:
            hosts: number of hosts.
            rate: rate of each host's link in each direction, in tc's form ("100mbit", "1gbit").
            ranks_per_host: number of ranks that `pool` starts in each host.
            delay: delay of each host's outgoing frames, in tc's form ("5ms"); needs the kernel's
                netem, which is often missing.

        Raises:
            ConfigError: if a number is below one, there are over 250 hosts, or the rate cannot be
                parsed.
        """
        if not 1 <= hosts <= 250 or ranks_per_host < 1:
            raise ConfigError(
                f"a lab has 1 to 250 hosts and at least one rank on each, got {hosts} and "
                f"{ranks_per_host}"
            )
        self.bytes_per_s = parse_rate(rate)
        self.hosts = hosts
        self.rate = rate
        self.ranks_per_host = ranks_per_host
        self.delay = delay
        self.name = ""

    def __enter__(self) -> NetLab:
        reason = available()
        if reason is not None:
            raise NetLabUnavailable(reason)
        sweep()
        self.name = f"{_PREFIX}{mark()}-{next(_labs)}"
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def pool(
        self,
        *,
        hosts: Sequence[int] | None = None,
        handicaps: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> RankPool:
        """A pool of ranks in the hosts, `ranks_per_host` consecutive ones in each.

        Args:
            hosts: indices of the hosts that get ranks; all by default.
            handicaps: words before each rank's command, as `handicap` makes them; none by default.
            **options: RankPool's options other than num_ranks, prefix and ranks_per_host.

        Returns:
            A pool, to be entered by the caller.

        Raises:
            ConfigError: if the lab's `with` block is not entered, it has no such host, or there is
                not one handicap for each rank.
        """
        hosts = range(self.hosts) if hosts is None else hosts
        prefix = [self.command(host) for host in hosts for _ in range(self.ranks_per_host)]
        if handicaps is not None:
            if len(handicaps) != len(prefix):
                raise ConfigError(
                    f"handicaps: expected one for each of {len(prefix)} ranks, got {len(handicaps)}"
                )
            # Inside `ip netns exec` no cgroup is visible, which a share of a core needs.
            prefix = [[*slow, *words] for slow, words in zip(handicaps, prefix, strict=True)]
        env = {**options.pop("env", {}), "GLOO_SOCKET_IFNAME": _DEVICE}
        return RankPool(
            len(prefix), prefix=prefix, env=env, ranks_per_host=self.ranks_per_host, **options
        )

    def command(self, host: int) -> list[str]:
        """Command prefix that runs a command in a host, such as a server next to the ranks.

        Raises:
            ConfigError: if the lab's `with` block is not entered, or it has no such host.
        """
        self._check_host(host)
        shm = str(_SHM / self._namespace(host))
        return [*_inside(self._namespace(host)), "sh", "-c", _IN_HOST, shm]

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"10.77.0.{host + 1}"

    def counters(self) -> list[HostCounters]:
        """Bytes and frames that each host's device carried since the lab was made, by host."""
        self._check_entered()
        return [self._counters(host) for host in range(self.hosts)]

    def cut(self, host: int) -> None:
        """Cuts a host off: no frame reaches or leaves it, and no connection learns of it.

        Raises:
            ConfigError: as for `command`.
        """
        self._set_port(host, "down")

    def restore(self, host: int) -> None:
        """Connects a host that was cut off; what its connections held back is sent again.

        Raises:
            ConfigError: as for `command`.
        """
        self._set_port(host, "up")

    def _set_port(self, host: int, state: str) -> None:
        self._check_host(host)
        # The switch's end: the host's own address and routes stay.
        where = _inside(self._namespace("switch"))
        _run(*where, "ip", "link", "set", f"port{host}", state)

    def _counters(self, host: int) -> HostCounters:
        text = _run(*_inside(self._namespace(host)), "cat", "/proc/net/dev")
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{_DEVICE}:"))
        fields = [int(field) for field in line.split(":")[1].split()]
        return HostCounters(
            rx_bytes=fields[0], rx_frames=fields[1], tx_bytes=fields[8], tx_frames=fields[9]
        )

    def _check_entered(self) -> None:
        if not self.name:
            raise ConfigError("this lab has no hosts: use it inside `with NetLab(...) as lab:`")

    def _check_host(self, host: int) -> None:
        self._check_entered()
        if not 0 <= host < self.hosts:
            raise ConfigError(f"this lab has the hosts 0 to {self.hosts - 1}, got {host}")

    def _namespace(self, host: int | str) -> str:
        return f"{self.name}-{host}"

    def _build(self) -> None:
        switch = self._namespace("switch")
        _add_namespace(switch)
        _run(*_inside(switch), "ip", "link", "add", "name", "bridge", "type", "bridge")
        _run(*_inside(switch), "ip", "link", "set", "bridge", "up")
        for host in range(self.hosts):
            namespace, port = self._namespace(host), f"port{host}"
            (_SHM / namespace).mkdir(mode=0o777)
            _add_namespace(namespace)
            _run(
                *_inside(switch),
                *("ip", "link", "add", "name", port, "type", "veth", "peer", "name", _DEVICE),
                *("netns", namespace),
            )
            _run(*_inside(switch), "ip", "link", "set", port, "master", "bridge", "up")
            address = f"{self.address(host)}/24"
            _run(*_inside(namespace), "ip", "address", "add", address, "dev", _DEVICE)
            _run(*_inside(namespace), "ip", "link", "set", _DEVICE, "up")
            _run(*_inside(namespace), "ip", "link", "set", "lo", "up")
            _run(*_inside(namespace), "ip", "link", "set", _DEVICE, "gso_max_size", _SEGMENT)
            self._limit(namespace, _DEVICE)
            self._limit(switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        rate = f"{self.bytes_per_s * 8:.0f}bit"
        where = ("tc", "qdisc", "add", "dev", device)
        limit = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
        if self.delay is None or device != _DEVICE:
            _run(*_inside(namespace), *where, "root", *limit)
            return
        try:
            delay = ("root", "handle", "1:", "netem", "delay", self.delay)
            _run(*_inside(namespace), *where, *delay)
        except TopologyError as error:
            raise NetLabUnavailable(
                f"delay={self.delay!r} needs tc's netem, which this kernel refused ({error}); "
                f"leave delay out"
            ) from error
        _run(*_inside(namespace), *where, "parent", "1:", *limit)

    def _remove(self) -> None:
        name, self.name = self.name, ""
        _remove_all(f"{name}-")


@functools.cache
def available() -> str | None:
    """Why labs cannot be built here, None if they can; tried by building one link."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux only, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root; run as root"
    missing = [tool for tool in ("ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}; install iproute2 and mount"
    name = f"{_PREFIX}{mark()}-probe"
    try:
        _add_namespace(name)
        _run(*_inside(name), "ip", "link", "add", "name", "bridge", "type", "bridge")
        _run(*_inside(name), "ip", "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
        limit = ("tbf", "rate", "1mbit", "burst", _BURST, "latency", _QUEUE)
        _run(*_inside(name), "tc", "qdisc", "add", "dev", "a", "root", *limit)
    except TopologyError as error:
        return f"this machine refuses network namespaces or links: {error}"
    finally:
        _remove_all(name)
    return None


def sweep() -> list[str]:
    """Remove namespaces, processes and /dev/shm folders of labs whose maker is dead.

    Returns:
        Names of what was removed.
    """
    dead = sorted({name for name in lab_names() if not is_alive(name.removeprefix(_PREFIX))})
    for name in dead:
        _remove_all(name)
    if dead:
        _log.warning("removed what dead labs left: %s", ", ".join(dead))
    return dead


def lab_names() -> list[str]:
    """Names of all labs' namespaces and /dev/shm folders on this machine."""
    return [
        path.name
        for folder in (Path("/run/netns"), _SHM)
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name.startswith(_PREFIX)
    ]


def _remove_all(prefix: str) -> None:
    for path in sorted(Path("/run/netns").glob(f"{prefix}*")):
        with suppress(TopologyError):
            for pid in _run("ip", "netns", "pids", path.name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            # Deleting the namespace deletes its devices, and with one end of a veth the other.
            _run("ip", "netns", "delete", path.name)
        except TopologyError as error:
            _log.warning("could not remove namespace %s: %s", path.name, error)
    for path in _SHM.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)


def _add_namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    # IPv6 neighbour discovery would add frames to the counters.
    path = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    _run(*_inside(name), "sh", "-c", f"[ ! -e {path} ] || echo 1 > {path}")


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if finished.returncode != 0:
        text = finished.stderr.strip() or f"exit status {finished.returncode}"
        raise TopologyError(f"`{' '.join(command)}` failed: {text}")
    return finished.stdout
