"""Connections between the processes of one job, over TCP.

Messages are pickles, and reading one runs what it says. So each side first proves that it knows the
job's key, which itself never travels here, and of one that does not nothing is read. The key lies in
torchrun's store: whoever reaches MASTER_PORT is let in. Large buffers go beside the messages as they
are. Nothing is encrypted, and what follows the proofs is not signed, as between process groups: who
can change packets on their way can run code here, so the network between the machines must be trusted.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from shared.errors import CommError

__all__ = ["Listener", "PeerLink", "connect"]

_SIZE = struct.Struct("<Q")
_PROOF_BYTES = 32
_PROOF_S = 10.0
"""How long the other side may take to prove itself."""

# A machine that is switched off closes nothing; asked 10 s after its last word and every 5 s then,
# it is given up after three silences.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerLink:
    """One connection, to a process that has proved itself."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes a connection."""
        self._socket = connection

    def fileno(self) -> int:
        """What to poll."""
        return self._socket.fileno()

    def limit(self, limit_s: float | None) -> None:
        """Sets how long sending and receiving may wait; for ever when None."""
        self._socket.settimeout(limit_s)

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: if the other side is gone.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_SIZE.pack(len(data)) + data)

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: if the other side has closed the connection.
            OSError: if it is gone.
        """
        (num_bytes,) = _SIZE.unpack(self.receive_bytes(_SIZE.size))
        return pickle.loads(self.receive_bytes(num_bytes))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Sends bytes as they are, which the other side expects."""
        self._socket.sendall(data)

    def receive_bytes(self, num_bytes: int) -> memoryview:
        """Waits for so many bytes, into memory that is the caller's own."""
        return _received(self._socket, num_bytes)

    def close(self) -> None:
        """Ends the connection; who waits on it here, or at the other side, goes on."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """Takes connections on a free port, each in a thread of its own."""

    def __init__(
        self,
        host: str,
        key: bytes,
        answer: Callable[[PeerLink], None],
        *,
        proof_s: float = _PROOF_S,
        max_unproven: int = 64,
    ) -> None:
        """Begins to listen.

        Args:
            host: an address of this machine, on which to listen; "" for all of them.
            key: of the job.
            answer: serves one connection, or leaves it to another thread; when it raises that the
                other side is gone, the connection is closed.
            proof_s: seconds that a caller may take to prove that it knows the key.
            max_unproven: callers that may be proving it at once; others wait to be accepted.

        Raises:
            OSError: if the host is no address of this machine.
        """
        self._key, self._answer, self._proof_s = key, answer, proof_s
        self._unproven = threading.Semaphore(max_unproven)
        if not host and socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._is_open = True
        threading.Thread(target=self._listen, name="hybridflow-listener", daemon=True).start()

    def _listen(self) -> None:
        while True:
            self._unproven.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._unproven.release()
                if not self._is_open:
                    return
                time.sleep(0.1)  # there is no descriptor free, or the caller is gone again
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                _introduce(connection, self._key, b"called", b"caller", self._proof_s)
            finally:
                self._unproven.release()
            self._answer(PeerLink(connection))
        except (CommError, EOFError, OSError):
            # A caller that can not prove itself, or goes, is nothing this process could act on.
            connection.close()

    def close(self) -> None:
        """Takes no more connections; those that are there go on."""
        self._is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, limit_s: float) -> PeerLink:
    """Opens a connection to a `Listener`.

    Args:
        address: host and port.
        key: of the job.
        limit_s: how long it may take to get there, in seconds.

    Raises:
        CommError: if who listens there is not of this job.
        OSError: if nobody listens there.
        EOFError: if they are gone again.
    """
    connection = socket.create_connection(address, limit_s)
    try:
        _introduce(connection, key, b"caller", b"called", _PROOF_S)
    except BaseException:
        connection.close()
        raise
    return PeerLink(connection)


def _introduce(
    connection: socket.socket, key: bytes, me: bytes, peer: bytes, limit_s: float
) -> None:
    """Proves to each other, by a number that the other has drawn, that both know the key."""
    deadline = time.monotonic() + limit_s
    connection.settimeout(limit_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    mine = secrets.token_bytes(_PROOF_BYTES)
    connection.sendall(mine)
    theirs = bytes(_received(connection, _PROOF_BYTES, deadline))
    connection.sendall(hmac.digest(key, me + mine + theirs, "sha256"))
    proof = bytes(_received(connection, _PROOF_BYTES, deadline))
    if not hmac.compare_digest(proof, hmac.digest(key, peer + theirs + mine, "sha256")):
        raise CommError(
            "expected a process of this job, got a connection to one that does not know its key; "
            "is another job using the same addresses?"
        )
    connection.settimeout(None)


def _received(
    connection: socket.socket, num_bytes: int, deadline: float | None = None
) -> memoryview:
    view = np.empty(num_bytes, np.uint8).data  # not zeroed before
    num_received = 0
    while num_received < num_bytes:
        if deadline is not None:  # of all, however slowly bytes drip in
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(view[num_received:])
        if not count:
            raise EOFError("the other side closed the connection")
        num_received += count
    return view
