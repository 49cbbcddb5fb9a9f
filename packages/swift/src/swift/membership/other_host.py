"""The supervisor of another host: it passes on what its processes say, and does what the first one tells."""

from __future__ import annotations

import selectors
import sys
import time
from dataclasses import replace
from typing import Any

from shared.errors import CommError
from swift.membership.channel import ControlChannel
from swift.membership.client import describe_stranger
from swift.membership.host_loop import HostLoop, disturb
from swift.membership.supervisor import Launch

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

    def run(self) -> int:
        """Runs until the first supervisor ends; returns the exit status.

        Raises:
            CommError: the first supervisor cannot be reached, or something else listens there.
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
        """See `HostLoop`."""
        self._tell({"kind": "started", "name": name, "rank": rank})

    def said(self, name: str, message: dict[str, Any]) -> None:
        """See `HostLoop`."""
        self._tell({"kind": "from", "name": name, "message": message})

    def gone(self, name: str, how: str, status: int | None) -> None:
        """See `HostLoop`."""
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
                self.check_interrupted()
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
                disturb(self.local, message)
        if channel.stray:
            raise CommError(describe_stranger(*self._address, repr(channel.stray[:40])))
        if channel.is_closed and self._status is None:
            sys.stderr.write(
                "meshyard-swift: the first supervisor has ended, and the run with it\n"
            )
            self._status = 1
