"""Keeps a table of rows for clients that come and go; the other end of `mspipe.memory.remote_rows`.

A thread serves each connection. It takes a request in whole before it looks at the table, so that a
client which dies halfway changes nothing, and one lock is around all that changes rows. Rows that are
read go to the socket from where they lie, without a copy in between.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

import torch
from torch import Tensor

from mspipe.memory.rows import LocalRows
from mspipe.memory.wire import MAX_BYTES, Op, Wire
from shared.errors import CommError, ConfigError, DataError

__all__ = ["MemoryServer"]

_log = logging.getLogger(__name__)

# What comes of sizes that no memory holds, from torch and numpy.
_REFUSALS = (ValueError, OverflowError, RuntimeError, MemoryError)


class MemoryServer:
    """One table, made as the first client asks for it, and kept until the server is closed.

    Clients are trusted: there is neither password nor encryption.

    Args:
        host: name or number of this machine's address to listen at; "0.0.0.0" for all of them.
        port: 0 for any that is free.

    Attributes:
        address: "tcp://host:port", the `place` of its clients.

    Raises:
        ConfigError: there is no such port.
        CommError: the address cannot be listened at.

    Example:
        >>> with MemoryServer() as server:
        ...     memory = NodeMemory(100, dim=8, mail_dim=16, place=server.address)
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port: expected 0 to 65535, got {port}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise CommError(
                f"expected to listen at {host} port {port}, {error}; take another port, or a host that "
                f"is this machine's"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{shown}:{self._listener.getsockname()[1]}"
        self._table = _Table()
        self._lock = threading.Lock()  # around the two that follow
        self._wires: set[Wire] = set()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serves in a thread of its own."""
        self._thread = threading.Thread(
            target=self.serve_forever, name="mspipe server", daemon=True
        )
        self._thread.start()

    def serve_forever(self) -> None:
        """Serves until `close` is called from elsewhere."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("%s: a client could not be let in: %s", self.address, error)
                time.sleep(0.1)  # as when files are all in use, which does not end at once
                continue
            wire = Wire(sock)
            with self._lock:
                if self._is_closed:
                    wire.close()
                    return
                self._wires.add(wire)
            threading.Thread(
                target=self._serve, args=(wire,), name="mspipe server's client", daemon=True
            ).start()

    def _serve(self, wire: Wire) -> None:
        try:
            while True:
                op, first, second = wire.receive_header()
                tensors = [wire.receive(part) for part in self._table.parts(op, first, second)]
                try:
                    answer = self._table.apply(op, first, tensors)
                except _REFUSALS as error:  # a DataError is a ValueError
                    text = bytearray(str(error).encode())
                    wire.send(Op.ERROR, len(text), 0, [torch.frombuffer(text, dtype=torch.uint8)])
                else:
                    told = self._table.num_rows, self._table.version
                    if answer is None:
                        wire.send(Op.OK, *told)
                    else:
                        wire.send_rows(Op.OK, *told, *answer)
        except EOFError:
            _log.debug("%s: a client left", self.address)
        except (OSError, RuntimeError, MemoryError) as error:
            _log.warning("%s: hung up on a client: %s", self.address, error)
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.shut()
            wire.close()

    def close(self) -> None:
        """Hangs up on all clients and forgets the rows; does nothing the second time."""
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


class _Table:
    """Rows, and what the requests of a connection mean for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around all that changes rows
        self._rows = LocalRows(0, torch.empty(0), torch.device("cpu"))
        self._fresh: Tensor | None = None  # until the first client comes
        self._num_rows_made = 0

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def version(self) -> int:
        return self._rows.version

    def parts(self, op: Op, first: int, second: int) -> list[Tensor]:
        """Room for the tensors that follow a header.

        Raises:
            ConnectionError: no such message is expected; where it ends is not known then.
        """
        if op != Op.HELLO and self._fresh is None:
            raise ConnectionError(f"expected hello first, got {op.name}")
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        if op == Op.HELLO:
            shapes = [((second,), torch.float32)]
        elif op == Op.READ:
            shapes = [((first,), torch.int64)]
        elif op == Op.WRITE:
            assert self._fresh is not None, "checked above"
            shapes = [((first,), torch.int64), ((first, len(self._fresh)), torch.float32)]
        elif op not in (Op.RESET, Op.GROW):
            raise ConnectionError(f"expected a request, got {op.name}")
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        if num_bytes > MAX_BYTES:
            raise ConnectionError(
                f"expected at most {MAX_BYTES:,} bytes, {num_bytes:,} are announced"
            )
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def apply(self, op: Op, first: int, tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Does what is asked; a read is answered by a table and ids of its rows.

        Raises:
            DataError: it cannot be done; nothing has changed.
        """
        if op == Op.READ:
            self._check(tensors[0])
            return self._rows.table, tensors[0]
        with self._lock:
            if op == Op.HELLO:
                self._meet(first, *tensors)
            elif op == Op.WRITE:
                self._check(tensors[0])
                self._rows.write(*tensors)
            elif op == Op.RESET:
                self._rows.reset()
            elif first > self.num_rows:
                self._rows.grow(first)
        return None

    def _meet(self, num_rows: int, fresh: Tensor) -> None:
        if self._fresh is None:
            self._rows = LocalRows(num_rows, fresh, torch.device("cpu"))
            self._fresh, self._num_rows_made = fresh, num_rows
            return
        if len(fresh) != len(self._fresh):
            wrong = f"rows of {len(self._fresh)} words, got {len(fresh)}"
        elif num_rows not in (self._num_rows_made, self.num_rows):
            wrong = f"{self.num_rows} rows, got {num_rows}"
        elif not torch.equal(fresh.view(torch.int32), self._fresh.view(torch.int32)):
            wrong = "rows that are the same at first, got others (is it another `start`?)"
        else:
            return
        raise DataError(
            f"this server's table was made for another memory: expected {wrong}; use the sizes it was "
            f"made with, or another server"
        )

    def _check(self, ids: Tensor) -> None:
        if not len(ids):
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.num_rows:
            raise DataError(
                f"expected ids in [0, {self.num_rows}), got {low} to {high}; grow makes room for more"
            )
