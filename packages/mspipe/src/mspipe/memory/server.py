"""TCP server of a table of rows; its clients are in `mspipe.memory.remote_rows`.

A thread serves each connection. It receives a whole request before it accesses the table, so that a
client that dies halfway changes nothing. One lock guards all changes of rows. Rows that are read
are copied a piece at a time and then sent, so that a slow client delays no writer, and none gets a
row that another was writing.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

import torch
from torch import Tensor

from mspipe.memory import shared_key
from mspipe.memory.rows import LocalRows
from mspipe.memory.wire import MAX_BYTES, Op, Wire
from shared.errors import CommError, ConfigError, DataError

__all__ = ["MemoryServer", "parse_address"]

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1024  # copied before they are sent
_LONGEST_ROW = 1 << 16  # words that are received of a client that is refused

# Raised by torch and numpy, among others for sizes that do not fit in memory; sent to the client.
_REFUSALS = (ValueError, OverflowError, RuntimeError, MemoryError)


def parse_address(bind: str) -> tuple[str, int]:
    """Splits an address to listen on, such as 0.0.0.0:7000 or [::1]:7000.

    Raises:
        ConfigError: it has no host, or no port.
    """
    host, _, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    # An empty host would listen on all addresses.
    if not host or "[" in host or "]" in host or not port.isdecimal():
        raise ConfigError(f"bind: expected host:port or [host]:port, got {bind!r}")
    return host, int(port)


class MemoryServer:
    """Server of one table, which the first client creates and which is kept until `close`.

    Clients are trusted, those that prove a key where the server has one; nothing is encrypted. The
    limits keep one of them, or a stranger, from taking the machine's memory or keeping others away.

    Args:
        host: hostname or address of this machine to listen on; "0.0.0.0" for all its addresses.
        port: port to listen on; 0 takes a free one.
        max_bytes: bytes of the table's rows at most, and of what one request carries.
        max_clients: connections at a time at most; a client of `NodeMemory` has two.
        timeout_s: seconds in which a new connection must say hello, in which a header must arrive
            once it has begun (at most twice that), and for which a message may stand still. A
            client that has said hello may be silent between requests for as long as it likes.
        key: what clients must prove to have before anything else, of `shared_key.read_key`; None
            serves whoever connects.

    Attributes:
        address: "tcp://host:port", for the clients' `place`.

    Raises:
        ConfigError: the port is not in 0 to 65535, a limit is not above 0, or the key is short.
        CommError: the address cannot be listened on.

    Example:
        >>> with MemoryServer() as server:
        ...     memory = NodeMemory(100, dim=8, mail_dim=16, place=server.address)
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_bytes: int | None = None,
        max_clients: int = 1024,
        timeout_s: float = 30.0,
        key: bytes | None = None,
    ) -> None:
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port: expected 0 to 65535, got {port}")
        if (max_bytes is not None and max_bytes < 1) or max_clients < 1 or timeout_s <= 0:
            raise ConfigError(
                f"expected max_bytes and max_clients of at least 1 and timeout_s above 0, got "
                f"{max_bytes}, {max_clients} and {timeout_s}"
            )
        self._key = None if key is None else shared_key.check_key(key, "key")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise CommError(
                f"expected to listen on {host} port {port}, got {error}; take another port, or an "
                f"address of this machine"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{shown}:{self._listener.getsockname()[1]}"
        self._table = _Table(max_bytes)
        self._max_clients, self._timeout_s = max_clients, timeout_s
        self._lock = threading.Lock()  # around the two that follow
        self._wires: set[Wire] = set()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serves in a background thread."""
        self._thread = threading.Thread(
            target=self.serve_forever, name="mspipe server", daemon=True
        )
        self._thread.start()

    def serve_forever(self) -> None:
        """Serves until another thread calls `close`."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("%s: accepting a client failed: %s", self.address, error)
                time.sleep(0.1)  # errors such as too many open files last for a while
                continue
            wire = Wire(sock, self._timeout_s)
            with self._lock:
                if self._is_closed:
                    wire.close()
                    return
                is_full = len(self._wires) >= self._max_clients
                if not is_full:
                    self._wires.add(wire)
            if is_full:
                self._refuse(wire)
                continue
            threading.Thread(
                target=self._serve, args=(wire,), name="mspipe server's client", daemon=True
            ).start()

    def _refuse(self, wire: Wire) -> None:
        text = f"expected at most {self._max_clients} connections; close some, or raise max_clients"
        _log.warning("%s: refused a client: %s", self.address, text)
        with suppress(OSError):
            _send_error(wire, text)
        wire.shut()
        wire.close()

    def _serve(self, wire: Wire) -> None:
        has_met = False
        try:
            while self._key is None or has_met or self._prove(wire, self._key):
                op, first, second = wire.receive_header(may_idle=has_met)
                has_met = True
                if op == Op.CHALLENGE:
                    text = "this server has no key; start it with --key-file, or come without one"
                    _send_error(wire, text)
                    continue
                tensors = [wire.receive(part) for part in self._table.parts(op, first, second)]
                try:
                    answer = self._table.apply(op, first, tensors)
                except _REFUSALS as error:  # a DataError is a ValueError
                    _send_error(wire, str(error))
                else:
                    told = self._table.num_rows, self._table.version
                    wire.send(Op.OK, *told, answer)
        except EOFError:
            _log.debug("%s: a client left", self.address)
        except BlockingIOError:
            _log.warning(
                "%s: closed a connection that stood still for %g s", self.address, self._timeout_s
            )
        except (OSError, RuntimeError, MemoryError) as error:
            _log.warning("%s: closed a client's connection: %s", self.address, error)
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.shut()
            wire.close()

    def _prove(self, wire: Wire, key: bytes) -> bool:
        """Whether a client proves the key; one that does not is told what is missing."""
        op, _, num_words = wire.receive_header()
        if op == Op.PING:  # tells that a memory server listens here, and nothing else
            wire.send(Op.OK)
            op, _, num_words = wire.receive_header()
        if op == Op.CHALLENGE:
            challenge = shared_key.new_challenge()
            wire.send(Op.OK, 0, 0, [challenge])
            op, _, _ = wire.receive_header()
            if op != Op.PROOF:
                raise ConnectionError(f"expected a proof, got {op.name}")
            answer = wire.receive(torch.empty_like(challenge))
            if shared_key.is_answer(answer, challenge, key):
                wire.send(Op.OK)
                return True
            got = "another"
        elif op == Op.HELLO and num_words <= _LONGEST_ROW:
            wire.receive(torch.empty(num_words))  # bytes left unread would reset the connection
            got = "none"
        else:
            raise ConnectionError(f"expected a challenge or hello first, got {op.name}")
        _log.warning("%s: refused a client: its key is %s", self.address, got)
        _send_error(
            wire,
            f"expected this server's key, got {got}; put it into the environment variable "
            f"{shared_key.KEY}, or its file's path into {shared_key.KEY_FILE}",
        )
        return False

    def close(self) -> None:
        """Disconnects all clients and stops serving; the rows are lost. May be called twice."""
        with self._lock:
            self._is_closed = True
            for wire in self._wires:
                wire.shut()
        with suppress(OSError):  # the second time
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> MemoryServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _send_error(wire: Wire, text: str) -> None:
    sent = bytearray(text.encode())
    wire.send(Op.ERROR, len(sent), 0, [torch.frombuffer(sent, dtype=torch.uint8)])


class _Table:
    """The rows, and the execution of requests on them."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # held by all changes of rows
        self._rows = LocalRows(0, torch.empty(0), torch.device("cpu"))
        self._fresh: Tensor | None = None  # set by the first client
        self._num_rows_made = 0

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def version(self) -> int:
        return self._rows.version

    def parts(self, op: Op, first: int, second: int) -> list[Tensor]:
        """Empty tensors to receive what follows a header.

        Raises:
            ConnectionError: the message is not a valid request, so that its end is unknown.
        """
        if op not in (Op.HELLO, Op.PING) and self._fresh is None:
            raise ConnectionError(f"expected hello first, got {op.name}")
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        if op == Op.HELLO:
            shapes = [((second,), torch.float32)]
        elif op == Op.READ:
            shapes = [((first,), torch.int64)]
        elif op == Op.WRITE:
            assert self._fresh is not None, "checked above"
            shapes = [((first,), torch.int64), ((first, len(self._fresh)), torch.float32)]
        elif op not in (Op.RESET, Op.GROW, Op.PING):
            raise ConnectionError(f"expected a request, got {op.name}")
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        most = min(MAX_BYTES, self._max_bytes or MAX_BYTES)
        if num_bytes > most:
            raise ConnectionError(f"expected at most {most:,} bytes, {num_bytes:,} are announced")
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def apply(self, op: Op, first: int, tensors: list[Tensor]) -> Iterator[Tensor]:
        """Executes a request; returns the rows that a read asks for, copied as they are taken.

        Raises:
            DataError: the request is invalid; nothing has changed.
        """
        if op == Op.PING:
            return iter(())
        if op == Op.READ:
            self._check(tensors[0])
            return map(self._rows.read, tensors[0].split(_ROWS_AT_ONCE))
        with self._lock:
            if op == Op.HELLO:
                self._meet(first, *tensors)
            elif op == Op.WRITE:
                self._check(tensors[0])
                self._rows.write(*tensors)
            elif op == Op.RESET:
                self._rows.reset()
            elif first > self.num_rows:
                assert self._fresh is not None, "hello came first"
                self._check_size(first, self._fresh)
                self._rows.grow(first)
        return iter(())

    def _meet(self, num_rows: int, fresh: Tensor) -> None:
        if self._fresh is None:
            self._check_size(num_rows, fresh)
            self._rows = LocalRows(num_rows, fresh, torch.device("cpu"))
            self._fresh, self._num_rows_made = fresh, num_rows
            return
        if len(fresh) != len(self._fresh):
            wrong = f"rows of {len(self._fresh)} words, got {len(fresh)}"
        elif num_rows not in (self._num_rows_made, self.num_rows):
            wrong = f"{self.num_rows} rows, got {num_rows}"
        elif not torch.equal(fresh.view(torch.int32), self._fresh.view(torch.int32)):
            wrong = "rows that are the same at first, got others (is `start` different?)"
        else:
            return
        raise DataError(
            f"this server's table was made for another memory: expected {wrong}; use the sizes it "
            f"was made with, or another server"
        )

    def _check_size(self, num_rows: int, fresh: Tensor) -> None:
        num_bytes = 4 * num_rows * len(fresh)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise DataError(
                f"expected a table of at most {self._max_bytes:,} bytes, got {num_bytes:,} for "
                f"{num_rows:,} rows; start the server with a larger --max-bytes"
            )

    def _check(self, ids: Tensor) -> None:
        if not len(ids):
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.num_rows:
            raise DataError(
                f"expected ids in [0, {self.num_rows}), got {low} to {high}; grow makes room for more"
            )
