"""The supervisor of another host: it passes on what its processes say, and does what the first one tells."""

from __future__ import annotations

import secrets
import selectors
import sys
import time
from collections.abc import Sequence
from typing import Any

from shared.errors import CommError, ConfigError
from swift.membership.channel import ControlChannel
from swift.membership.client import describe_stranger
from swift.membership.host_loop import HostLoop, disturb
from swift.membership.settings import Launch
from swift.membership.supervisor import Ended

__all__ = ["OtherHost"]

_CONNECT_S = 2.0
_RETRY_S = 0.5


class OtherHost(HostLoop):
    """The supervisor of another host."""

    def __init__(self, launch: Launch, address: tuple[str, int], wait_s: float) -> None:
        super().__init__(launch)
        self._address = address
        self._wait_s = wait_s
        self._channel: ControlChannel | None = None
        self._heard_s = 0.0
        self._status: int | None = None
        self._start = secrets.token_hex(8)  # tells this supervisor from another of the same number

    def run(self) -> int:
        """Runs until the first supervisor ends; returns the exit status.

        Raises:
            CommError: the first supervisor cannot be reached, or something else listens there.
            ConfigError: it was started otherwise than this one.
        """
        self._connect(self.launch.ranks)
        self.start_all(self.launch.ranks)
        last_beat = 0.0
        while self._status is None:
            self.watch(self._handle)
            now = time.monotonic()
            if self._status is None and now - self._heard_s > self.launch.heartbeat_s:
                silence = (
                    f"heard nothing from the first supervisor for {self.launch.heartbeat_s:g} s"
                )
                self._fence(f"{silence}: its ranks are replaced, so they are killed here")
            if self._channel is not None and now - last_beat > self.launch.heartbeat_s / 5:
                last_beat = now
                self._channel.send({"kind": "beat"})
            if self._status is None:
                self.refill(0)
        return self._status

    def started(self, name: str, rank: int | None) -> None:
        """See `HostLoop`."""
        self._tell({"kind": "started", "name": name, "rank": rank})

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `HostLoop`."""
        self._tell({"kind": "from", "name": name, "message": message})

    def gone(self, name: str, ended: Ended) -> None:
        """See `HostLoop`."""
        told = {"how": ended.how, "status": ended.status, "silent_s": ended.silent_s}
        self._tell({"kind": "gone", "name": name, **told})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _connect(self, starts: Sequence[int]) -> None:
        """Connects to the first supervisor, and says who is there and which ranks are started."""
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
                self.check_interrupted()
                time.sleep(_RETRY_S)
        self.selector.register(self._channel, selectors.EVENT_READ, ("first", None))
        self._channel.send(
            {
                "kind": "hello",
                "host": self.launch.host,
                "start": self._start,
                "world_size": self.launch.world_size,
                "num_ranks": len(self.launch.ranks),
                "heartbeat_s": self.launch.heartbeat_s,
                "starts": list(starts),
            }
        )
        self._heard_s = time.monotonic() + self._wait_s  # it starts its own processes first

    def _fence(self, why: str) -> None:
        """Kills processes that others have replaced, and comes back with spares alone."""
        assert self._channel is not None, "connected when the loop began"
        sys.stderr.write(f"meshyard-swift: host {self.launch.host} {why}\n")
        self.selector.unregister(self._channel)
        self._channel.close()
        self.local.kill_all()
        self._connect(())
        self.num_spares = len(self.launch.ranks) + self.launch.num_spares
        self.start_all(())

    def _handle(self, key: Any) -> None:
        channel = self._channel
        if key.data[0] != "first" or channel is None:
            return
        for message in channel.receive():
            self._heard_s = time.monotonic()
            if message["kind"] == "to":
                self.local.send(message["name"], message["message"])
            elif message["kind"] == "start":
                self.start(message["rank"])
            elif message["kind"] == "end":
                self._status = message["status"]
            elif message["kind"] == "refuse":
                raise ConfigError(message["reason"])
            elif message["kind"] == "fence":
                self._fence(message["why"])
                return
            elif message["kind"] in ("kill", "stop", "cut"):
                disturb(self.local, message)
        if channel.stray:
            raise CommError(describe_stranger(*self._address, repr(channel.stray[:40])))
        if channel.is_closed and self._status is None:
            sys.stderr.write(
                "meshyard-swift: the first supervisor has ended, and the run with it\n"
            )
            self._status = 1
