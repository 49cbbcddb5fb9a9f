"""Rows that a server keeps, in another process or on another machine.

A message is a header of 24 bytes and the raw bytes of tensors; both ends are little-endian:

    HELLO num_rows, words; the fresh row     READ  n, 0; ids
    WRITE n, 0; ids, rows                    RESET 0, 0
    GROW  num_rows, 0

Each is answered by OK num_rows, version, and after READ the rows; or by ERROR bytes, 0 and a text.
Nothing is pickled, and rows go from the socket straight into the tensor that the caller gets.

A client has two connections, one that reads and one that changes, so that the pipeline's first stage
fetches rows while its last one writes others. As with `SharedRows`, a reader may see half of a row that
is being written at that moment; whoever reads after `write` has returned sees all of it.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import CommError, ConfigError, DataError

__all__ = ["MAX_BYTES", "Op", "RemoteRows", "Wire"]

MAX_BYTES = 1 << 32
"""Of a request; a header that announces more is taken for damaged."""

_MAGIC = b"MSP1"
_HEADER = struct.Struct("<4sIQQ")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.writev.restype = ctypes.c_ssize_t
_VOID = ctypes.c_void_p
_MOST_PIECES = 1024  # of a call; the system's limit
_PATIENCE_S = 5.0  # with a server that is not there yet


class Op(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    READ = 2
    WRITE = 3
    RESET = 4
    GROW = 5
    OK = 6
    ERROR = 7


_OPS = frozenset(Op)


class Wire:
    """One end of a connection: sends and receives messages, and raises `OSError` where it cannot.

    Args:
        sock: connected.
        timeout_s: longest wait for the other end; None for ever.
    """

    def __init__(self, sock: socket.socket, timeout_s: float | None = None) -> None:
        # The kernel's own timeouts, as Python's would ask the kernel twice for every piece.
        sock.settimeout(None)
        if timeout_s is not None:
            seconds, rest = divmod(timeout_s, 1)
            interval = struct.pack("@ll", int(seconds), int(1e6 * rest))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock

    def send(self, op: Op, first: int = 0, second: int = 0, payload: Iterable[Tensor] = ()) -> None:
        """Sends a message; tensors are taken one by one, as soon as there is room for their bytes."""
        head = _HEADER.pack(_MAGIC, op, first, second)
        for tensor in payload:
            self._put(head, _bytes_of(tensor))
            head = b""  # it went along with the first tensor
        if head:
            self._put(head)

    def send_rows(self, op: Op, first: int, second: int, table: Tensor, ids: Tensor) -> None:
        """Sends a message with rows of a table, which the kernel reads where they lie.

        Args:
            op, first, second: as in `send`.
            table: float32 [num_rows, words] on the CPU, contiguous.
            ids: int64 [n], of its rows.
        """
        head = np.frombuffer(_HEADER.pack(_MAGIC, op, first, second), np.uint8)
        row_bytes = 4 * table.shape[1]
        pieces = np.empty((1 + len(ids), 2), np.uint64)  # an address and a length each
        pieces[0] = head.ctypes.data, len(head)
        pieces[1:, 0] = table.data_ptr() + row_bytes * ids.numpy()
        pieces[1:, 1] = row_bytes
        at = 0
        while at < len(pieces):
            count = min(_MOST_PIECES, len(pieces) - at)
            sent = _LIBC.writev(self._sock.fileno(), pieces[at:].ctypes.data_as(_VOID), count)
            if sent < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                raise OSError(number, os.strerror(number))
            ends = pieces[at : at + count, 1].cumsum()
            done = int(ends.searchsorted(sent, "right"))
            at += done
            if done < count:  # the rest of a piece is to follow
                rest = int(ends[done]) - sent
                pieces[at, 0] += pieces[at, 1] - np.uint64(rest)
                pieces[at, 1] = rest

    def _put(self, *buffers: bytes | memoryview) -> None:
        sent = self._sock.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self._sock.sendall(buffer[sent:])
            sent = max(0, sent - len(buffer))

    def receive_header(self) -> tuple[Op, int, int]:
        """The next message's operation and its two numbers."""
        head = bytearray(_HEADER.size)
        self._fill(memoryview(head))
        magic, op, first, second = _HEADER.unpack(head)
        if magic != _MAGIC or op not in _OPS:
            raise ConnectionError(f"expected a message of mspipe's, got {bytes(head)!r}")
        return Op(op), first, second

    def receive(self, into: Tensor) -> Tensor:
        """Fills a contiguous tensor with what follows."""
        self._fill(_bytes_of(into))
        return into

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            got = self._sock.recv_into(buffer, flags=socket.MSG_WAITALL)
            if not got:
                raise EOFError("the other end hung up")
            buffer = buffer[got:]

    def shut(self) -> None:
        """Ends both directions; whoever waits in another thread wakes."""
        with suppress(OSError):  # where the other end was quicker
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back."""
        self._sock.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().numpy().reshape(-1).view(np.uint8).data


class RemoteRows:
    """Rows of a table that `mspipe serve-memory` keeps.

    The first client to come has the server make the table; later ones find it as it was left.

    Args:
        place: "tcp://host:port".
        num_rows: how many, as when the table was made, or as there are by now.
        fresh: what each is at first.
        timeout_s: longest wait for the server.

    Attributes:
        num_rows, version: as the server told last, on connecting or after a change of this client's.

    Raises:
        ConfigError: the address is malformed.
        CommError: there is no server, or it does not answer; only `close` is of use then.
        DataError: the table has other rows.
    """

    def __init__(
        self, place: str, num_rows: int, fresh: Float[Tensor, " words"], timeout_s: float = 30.0
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s: expected more than 0, got {timeout_s}")
        self.device = torch.device("cpu")
        self.num_rows, self.version = num_rows, 0
        self._num_words = len(fresh)
        self._lines: list[_Line] = []
        try:
            for _ in range(2):
                self._lines.append(_Line(place, timeout_s))
                hello = Op.HELLO, num_rows, len(fresh), [fresh.to("cpu", torch.float32)]
                self.num_rows, self.version = self._lines[-1].ask("hello", *hello)
        except BaseException:
            self.close()
            raise
        self._reading, self._changing = self._lines

    def read(self, ids: Int64[Tensor, " n"]) -> Float[Tensor, "n words"]:
        """Copies of rows.

        Raises:
            DataError: an id is out of range.
            CommError: the server does not answer, or `close` was called.
        """
        rows = torch.empty(len(ids), self._num_words)
        self._reading.ask(f"read of {len(ids)} rows", Op.READ, len(ids), 0, [ids.cpu()], rows)
        return rows

    def write(self, ids: Int64[Tensor, " n"], rows: Float[Tensor, "n words"]) -> None:
        """Replaces rows of different numbers, all or none, and counts a version.

        Raises:
            DataError: an id is out of range, rows do not fit, or there is no room for so many.
            CommError: the server does not answer, which leaves open whether it has written.
        """
        if tuple(rows.shape) != (len(ids), self._num_words):
            raise DataError(
                f"write: expected rows [{len(ids)}, {self._num_words}], got {list(rows.shape)}"
            )
        num_bytes = 8 * len(ids) + 4 * rows.numel()
        if num_bytes > MAX_BYTES:
            raise DataError(
                f"write: expected at most {MAX_BYTES:,} bytes at once, got {num_bytes:,}; split it"
            )
        self._change(
            f"write of {len(ids)} rows",
            Op.WRITE,
            len(ids),
            ids.cpu(),
            rows.to("cpu", torch.float32),
        )

    def reset(self) -> None:
        """Has all rows as at first, and counts a version; raises as `write`."""
        self._change("reset", Op.RESET)

    def grow(self, num_rows: int) -> None:
        """Adds rows as at first; fewer than there are change nothing. Raises as `write`."""
        self._change(f"grow to {num_rows} rows", Op.GROW, num_rows)

    def _change(self, what: str, op: Op, count: int = 0, *payload: Tensor) -> None:
        self.num_rows, self.version = self._changing.ask(what, op, count, 0, payload)

    def close(self) -> None:
        """Hangs up, also where another thread waits for an answer; the server keeps the rows."""
        for line in self._lines:
            line.close()


class _Line:
    """A connection that asks one thing at a time."""

    def __init__(self, place: str, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._lock, self._is_closed = threading.Lock(), False
        self._wire = Wire(_connect(place, timeout_s), timeout_s)

    def ask(
        self,
        what: str,
        op: Op,
        first: int = 0,
        second: int = 0,
        payload: Iterable[Tensor] = (),
        answer: Tensor | None = None,
    ) -> tuple[int, int]:
        """Sends a request, fills `answer`, and returns the server's num_rows and version."""
        with self._lock:
            try:
                self._wire.send(op, first, second, payload)
                kind, num_rows, version = self._wire.receive_header()
                if kind == Op.ERROR:
                    text = self._wire.receive(
                        torch.empty(min(num_rows, 1 << 16), dtype=torch.uint8)
                    )
                    raise DataError(
                        f"{self._place}: {bytes(text.tolist()).decode(errors='replace')}"
                    )
                if kind != Op.OK:
                    raise ConnectionError(f"{kind.name} is no answer")
                if answer is not None:
                    self._wire.receive(answer)
            except (OSError, EOFError) as error:
                self._wire.shut()  # what may still come belongs to no request
                raise CommError(
                    f"{self._place}: expected an answer to {what}, {self._reason(error)}"
                ) from error
        return num_rows, version

    def _reason(self, error: Exception) -> str:
        if self._is_closed:
            return "the connection was closed at this end"
        if isinstance(error, BlockingIOError):
            return f"none came within {self._timeout_s:g} s; see whether the server is at work"
        return f"{error}; start `mspipe serve-memory` there again, and restore from a checkpoint"

    def close(self) -> None:
        self._is_closed = True
        self._wire.shut()
        with self._lock:
            self._wire.close()


def _connect(place: str, timeout_s: float) -> socket.socket:
    address = _parsed(place)
    deadline, pause = time.monotonic() + _PATIENCE_S, 0.02
    while True:
        left = max(pause, deadline - time.monotonic())
        try:
            return socket.create_connection(address, timeout=min(timeout_s, left))
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise CommError(
                    f"{place}: expected a memory server, {error}; is `mspipe serve-memory` running "
                    f"there?"
                ) from error
        time.sleep(pause)
        pause *= 2


def _parsed(place: str) -> tuple[str, int]:
    try:
        parts = urlsplit(place)
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path + parts.query:
            return parts.hostname, parts.port
    except ValueError:
        pass  # a port that is no number, or brackets that do not close
    raise ConfigError(f"place: expected 'tcp://host:port' with a port of 1 to 65535, got {place!r}")
