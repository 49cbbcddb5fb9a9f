"""Client of a row server in another process or on another machine.

A client has two connections, one for reads and one for changes, so that the pipeline's fetch stage
reads rows while its write stage writes others. As with `SharedRows`, a read may return a partly
written row during a write; a read after `write` has returned sees the whole row.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mspipe.memory import shared_key
from mspipe.memory.wire import MAX_BYTES, Op, Wire
from shared.errors import CommError, ConfigError, DataError

__all__ = ["RemoteRows"]


class RemoteRows:
    """Rows of the table that `mspipe serve-memory` holds.

    The first client creates the table; later ones find it as it was left.

    Args:
        place: "tcp://host:port" of the server.
        num_rows: number of rows, either the table's initial or its present one.
        fresh: float32 [words], the initial value of each row.
        timeout_s: seconds to wait for an answer of the server at most.
        patience_s: seconds to keep trying to connect while no server listens.
        key: what the server asks its clients to prove; None for a server without one.

    Attributes:
        num_rows, version: the server's values at the latest connection or change by this client.

    Raises:
        ConfigError: the address is malformed.
        CommError: there is no server, or it does not answer; only `close` may be called then.
        DataError: the table has other sizes or initial values, or the server has another key.
    """

    def __init__(
        self,
        place: str,
        num_rows: int,
        fresh: Float[Tensor, " words"],
        timeout_s: float = 30.0,
        patience_s: float = 5.0,
        key: bytes | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s: expected more than 0, got {timeout_s}")
        self.device = torch.device("cpu")
        self.num_rows, self.version = num_rows, 0
        self._num_words = len(fresh)
        self._lines: list[_Line] = []
        try:
            for _ in range(2):
                self._lines.append(_Line(place, timeout_s, patience_s))
                if key is not None:
                    self._lines[-1].prove(key)
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
        """Replaces rows with distinct ids, all or none, and increments the version.

        Raises:
            DataError: an id is out of range, the shape is wrong, or there are too many rows.
            CommError: the server does not answer; the rows may or may not have been written.
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
        """Sets all rows to their initial value and increments the version; raises as `write`."""
        self._change("reset", Op.RESET)

    def grow(self, num_rows: int) -> None:
        """Extends the table to `num_rows` rows, unless it has as many; raises as `write`."""
        self._change(f"grow to {num_rows} rows", Op.GROW, num_rows)

    def _change(self, what: str, op: Op, count: int = 0, *payload: Tensor) -> None:
        self.num_rows, self.version = self._changing.ask(what, op, count, 0, payload)

    def close(self) -> None:
        """Disconnects, even while another thread waits for an answer; the server keeps the rows."""
        for line in self._lines:
            line.close()


# A server answers a greeting at once; making its table may take longer.
GREETING_S = 5.0


class _Line:
    """A connection with one request at a time."""

    def __init__(self, place: str, timeout_s: float, patience_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._lock, self._is_closed = threading.Lock(), False
        sock = _connect(place, timeout_s, patience_s)
        self._wire = Wire(sock, min(timeout_s, GREETING_S))
        try:
            self.ask("greeting", Op.PING)
        except CommError as error:
            self.close()
            raise CommError(
                f"{place}: expected a memory server, something else listens there and gave "
                f"{_describe(error.__cause__)}; give the address that `mspipe serve-memory` prints"
            ) from error
        self._wire = Wire(sock, timeout_s)

    def prove(self, key: bytes) -> None:
        """Shows the server that this client has its key."""
        challenge = torch.empty(shared_key.DIGEST_BYTES, dtype=torch.uint8)
        self.ask("a challenge", Op.CHALLENGE, answer=challenge)
        answer = shared_key.answer_to(challenge, key)
        self.ask("a proof of the key", Op.PROOF, len(answer), payload=[answer])

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
                self._wire.shut()  # an answer that arrives later must not be taken for the next
                raise CommError(
                    f"{self._place}: expected an answer to {what}, {self._reason(error)}"
                ) from error
        return num_rows, version

    def _reason(self, error: Exception) -> str:
        if self._is_closed:
            return "the connection was closed at this end"
        if isinstance(error, BlockingIOError):
            return f"got none within {self._timeout_s:g} s; check whether the server is running"
        return f"got {error}; restart `mspipe serve-memory` there and restore from a checkpoint"

    def close(self) -> None:
        self._is_closed = True
        self._wire.shut()
        with self._lock:
            self._wire.close()


def _describe(error: BaseException | None) -> str:
    return f"no answer in {GREETING_S:g} s" if isinstance(error, BlockingIOError) else str(error)


def _connect(place: str, timeout_s: float, patience_s: float) -> socket.socket:
    address = _parse(place)
    deadline, pause = time.monotonic() + patience_s, 0.02
    while True:
        left = max(pause, deadline - time.monotonic())
        try:
            return socket.create_connection(address, timeout=min(timeout_s, left))
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise CommError(
                    f"{place}: expected a memory server, got {error}; is `mspipe serve-memory` "
                    f"running there?"
                ) from error
        time.sleep(pause)
        pause *= 2


def _parse(place: str) -> tuple[str, int]:
    try:
        parts = urlsplit(place)
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path + parts.query:
            return parts.hostname, parts.port
    except ValueError:
        pass  # a port that is no number, or brackets that do not close
    raise ConfigError(f"place: expected 'tcp://host:port' with a port of 1 to 65535, got {place!r}")
