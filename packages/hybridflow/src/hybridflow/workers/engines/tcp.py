"""Connections between the processes of one job, over TCP.

Messages are pickles, and unpickling can run any code. So each side first proves that it knows the
job's key, which is never sent here; no message is read from a peer that does not. The key lies in
torchrun's store, so anyone who can reach MASTER_PORT can join. Large buffers are sent raw after the
messages. Nothing is encrypted, and messages after the proofs are not signed, as between process
groups: anyone who can change packets can run code here, so the network must be trusted.
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
"""Seconds that the other side may take to prove that it knows the key."""

# A machine that is switched off closes no connection. TCP probes it after 10 s of silence, then
# every 5 s, and drops the connection after three probes without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerLink:
    """A connection to a process that has proved that it knows the key."""

    def __init__(self, connection: socket.socket) -> None:
        """Wraps a connected socket."""
        self._socket = connection

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def limit(self, limit_s: float | None) -> None:
        """Sets the timeout of sending and receiving in seconds; none when None."""
        self._socket.settimeout(limit_s)

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: if the connection is lost.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_SIZE.pack(len(data)) + data)

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: if the other side has closed the connection.
            OSError: if the connection is lost.
        """
        (num_bytes,) = _SIZE.unpack(self.receive_bytes(_SIZE.size))
        return pickle.loads(self.receive_bytes(num_bytes))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Sends raw bytes, for which the other side must call `receive_bytes`."""
        self._socket.sendall(data)

    def receive_bytes(self, num_bytes: int) -> memoryview:
        """Waits for `num_bytes` raw bytes; returns them in fresh memory."""
        return _received(self._socket, num_bytes)

    def close(self) -> None:
        """Closes the connection; threads blocked on it, on either side, are woken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """Accepts connections on a free port, and serves each in a thread of its own."""

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
            host: an address of this machine to listen on; "" for all of them.
            key: the job's key.
            answer: serves one connection, or hands it to another thread; when it raises because
                the other side has closed, the connection is closed here too.
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
                time.sleep(0.1)  # no free descriptor, or the caller has closed already
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
            # The caller does not know the key, or has closed: this process can do nothing.
            connection.close()

    def close(self) -> None:
        """Stops accepting connections; open ones stay open."""
        self._is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, limit_s: float) -> PeerLink:
    """Opens a connection to a `Listener`.

    Args:
        address: host and port.
        key: the job's key.
        limit_s: timeout of connecting, in seconds.

    Raises:
        CommError: if the listener does not know this job's key.
        OSError: if nothing listens at the address.
        EOFError: if the listener closes the connection.
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
    """Proves mutually that both sides know the key, by an HMAC of each other's random number."""
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
    view = np.empty(num_bytes, np.uint8).data  # unlike bytearray, not zeroed first
    num_received = 0
    while num_received < num_bytes:
        if deadline is not None:  # of all, however slowly bytes drip in
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(view[num_received:])
        if not count:
            raise EOFError("the other side closed the connection")
        num_received += count
    return view
