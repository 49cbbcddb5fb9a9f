"""Messages between supervisors and processes: a line of JSON each, over a socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

__all__ = ["ControlChannel", "is_known"]

_SEND_S = 5.0

_Types = type | tuple[type, ...]
_RANK = (int, type(None))
_FIELDS: dict[str, dict[str, _Types]] = {
    # Of other hosts' supervisors.
    "hello": {
        "host": int,
        "start": str,
        "world_size": int,
        "num_ranks": int,
        "heartbeat_s": (int, float),
        "starts": list,
    },
    "started": {"name": str, "rank": _RANK},
    "from": {"name": str, "message": dict},
    "gone": {
        "name": str,
        "how": str,
        "status": (int, type(None)),
        "silent_s": (int, float),
    },
    "beat": {},
    # Of commands.
    "status": {},
    "inject": {"fault": str, "rank": int, "seconds": (int, float)},
}
"""What may come over the first supervisor's port: by kind, what a message must have."""


class ControlChannel:
    """A socket that sends and receives dictionaries; sending is safe from several threads.

    Attributes:
        is_closed: whether the peer has ended, or is none of ours.
        stray: what a peer has sent that is none of ours.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._unread = b""
        self._is_cut = False
        self.is_closed = False
        self.stray = b""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; to a peer that has ended it is lost.

        A peer that does not take it in time has a part of it, so the connection ends there: the next
        `receive` finds its end.
        """
        with self._lock:
            if self._is_cut:
                return
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._is_cut = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[dict[str, Any]]:
        """Waits for bytes and returns the messages that they complete.

        At the peer's end, and when it is none of ours, `is_closed` is true afterwards.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self.is_closed = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.is_closed, self.stray = True, line or b"\n"
                break
            messages.append(message)
        return messages

    def messages(self) -> Iterator[dict[str, Any]]:
        """All messages until the peer's end."""
        while not self.is_closed:
            yield from self.receive()

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    @staticmethod
    def connect(address: tuple[str, int], timeout_s: float) -> ControlChannel:
        """A channel to a listening socket.

        Raises:
            OSError: nobody listens, or not within the time.
        """
        connection = socket.create_connection(address, timeout_s)
        return ControlChannel.over(connection)

    @staticmethod
    def over(connection: socket.socket) -> ControlChannel:
        """A channel over a TCP connection, whose messages are sent at once."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that is cut off must not hold the sender for longer than this.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
        return ControlChannel(connection)


_TIMEVAL = int(_SEND_S).to_bytes(8, "little") + bytes(8)


def is_known(message: dict[str, Any]) -> bool:
    """Whether a message is of a kind that a supervisor or a command sends, with all its fields."""
    fields = _FIELDS.get(str(message.get("kind")))
    return fields is not None and all(
        name in message and isinstance(message[name], types) for name, types in fields.items()
    )
