"""Wire protocol between the clients of a row server and the server.

A message is a header of 24 bytes and the raw bytes of tensors; both ends are little-endian:

    HELLO num_rows, words; the fresh row     READ  n, 0; ids
    WRITE n, 0; ids, rows                    RESET 0, 0
    GROW  num_rows, 0                        PING  0, 0
    CHALLENGE 0, 0                           PROOF 32, 0; the answer to a challenge

The answer is OK num_rows, version, and after READ the rows, after CHALLENGE 32 random bytes; or ERROR
bytes, 0 and a text. Nothing is pickled, and rows are received straight into the tensor that the caller
gets.
"""

from __future__ import annotations

import enum
import errno
import math
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from torch import Tensor

__all__ = ["MAX_BYTES", "Op", "Wire"]

MAX_BYTES = 1 << 32
"""Maximum size of a request's tensors; a header that announces more is refused."""

_MAGIC = b"MSP1"
_HEADER = struct.Struct("<4sIQQ")


class Op(enum.IntEnum):
    """Kind of a message."""

    HELLO = 1
    READ = 2
    WRITE = 3
    RESET = 4
    GROW = 5
    OK = 6
    ERROR = 7
    PING = 8
    CHALLENGE = 9
    PROOF = 10


_OPS = frozenset(Op)


class Wire:
    """One end of a connection, which sends and receives messages and raises `OSError` on failure.

    Args:
        sock: connected TCP socket.
        timeout_s: seconds to wait for the other end at most; None waits forever.
    """

    def __init__(self, sock: socket.socket, timeout_s: float | None = None) -> None:
        # Timeouts of the kernel: Python's would cost a second system call for every piece.
        sock.settimeout(None)
        if timeout_s is not None:
            seconds, rest = divmod(timeout_s, 1)
            interval = struct.pack("@ll", int(seconds), int(1e6 * rest))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock, self._timeout_s = sock, timeout_s

    def send(self, op: Op, first: int = 0, second: int = 0, payload: Iterable[Tensor] = ()) -> None:
        """Sends a message; an iterator of tensors is advanced once the previous one is sent."""
        head = _HEADER.pack(_MAGIC, op, first, second)
        for tensor in payload:
            self._put(head, _bytes_of(tensor))
            head = b""  # sent together with the first tensor
        if head:
            self._put(head)

    def _put(self, *buffers: bytes | memoryview) -> None:
        sent = self._sock.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self._sock.sendall(buffer[sent:])
            sent = max(0, sent - len(buffer))

    def receive_header(self, *, may_idle: bool = False) -> tuple[Op, int, int]:
        """The next message's operation and its two numbers.

        Args:
            may_idle: wait for its first byte for any time; what follows must arrive within the
                timeout, counted from when that byte was seen, however slowly it trickles.
        """
        head = bytearray(_HEADER.size)
        left, deadline = memoryview(head), None if may_idle else self._deadline()
        while len(left):
            if deadline is not None and time.monotonic() > deadline:
                raise BlockingIOError(errno.EAGAIN, "a header that does not end")
            try:
                left = left[self._receive_some(left) :]
            except BlockingIOError:
                if deadline is not None:
                    raise
            else:
                deadline = deadline or self._deadline()
        magic, op, first, second = _HEADER.unpack(head)
        if magic != _MAGIC or op not in _OPS:
            raise ConnectionError(f"expected a header of mspipe's protocol, got {bytes(head)!r}")
        return Op(op), first, second

    def receive(self, into: Tensor) -> Tensor:
        """Fills a contiguous tensor with the bytes that follow."""
        self._fill(_bytes_of(into))
        return into

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            buffer = buffer[self._receive_some(buffer) :]

    def _receive_some(self, buffer: memoryview) -> int:
        got = self._sock.recv_into(buffer, flags=socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other end hung up")
        return got

    def _deadline(self) -> float:
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def shut(self) -> None:
        """Shuts down both directions, which wakes threads that wait on the socket."""
        with suppress(OSError):  # the other end may have closed it already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().numpy().reshape(-1).view(np.uint8).data
