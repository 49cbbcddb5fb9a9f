"""Connections that end with their processes, by which a rank's death is known within a second.

Rank 0 listens, and every other rank holds one connection to it, over which it sends a token and its
number and then nothing. The kernel closes a connection when its process ends, however it ends; a
machine that is switched off is missed by TCP's probes after some 25 s. Forked children close what
they inherit, since a connection would otherwise outlive its rank. A rank that cannot connect is
known to be dead by the timeout only, as are ranks that hang.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import weakref
from contextlib import suppress

import msgspec

__all__ = ["Liveness"]

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_CONNECT_S = 10.0
# TCP probes after 10 s of silence, then every 5 s, and gives up after three without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class _Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: bytes


class Liveness:
    """The connections of one rank: to all others on rank 0, to rank 0 elsewhere."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Rank 0 begins to listen; the others `connect` to what its `address` says."""
        self._rank, self._world_size = rank, world_size
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._greetings: list[socket.socket] = []
        self._connections: dict[int, socket.socket] = {}
        _all.add(self)

    def listen(self, is_first: bool = True) -> bytes:
        """Begins to listen.

        Args:
            is_first: whether this is rank 0 of the world, whose machine MASTER_ADDR names.

        Returns:
            The address and token for the others, empty if it cannot listen.
        """
        try:
            host = _find_host(is_first)
            family, _, _, _, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            address = str(found[0])
            is_alone = os.environ.get("LOCAL_WORLD_SIZE") == str(self._world_size)
            if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not is_alone:
                address = ""  # on its own machine a name may mean this, and not so elsewhere
            self._listener = socket.create_server(
                (address, 0), family=family, backlog=self._world_size
            )
            self._listener.setblocking(False)
        except OSError as error:
            _log.info("dead ranks will be known by the timeout only: cannot listen: %s", error)
            return b""
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(_Address(host, port, self._token))

    def connect(self, data: bytes) -> None:
        """Connects to rank 0; does nothing if that does not listen."""
        if not data:
            return
        address = msgspec.msgpack.decode(data, type=_Address)
        try:
            connection = socket.create_connection((address.host, address.port), _CONNECT_S)
            connection.sendall(_GREETING.pack(address.token, self._rank))
        except OSError as error:
            _log.info(
                "rank %d: the death of this rank or of rank 0 will be known by the timeout only: "
                "cannot connect to %s at port %d: %s",
                self._rank, address.host, address.port, error,
            )  # fmt: skip
            return
        self._keep(0, connection)

    def find_lost(self) -> list[int]:
        """The ranks at the other end whose process has ended."""
        self._accept()
        lost = []
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            # Nothing is sent after the greeting, so what can be read is the end.
            lost.append(ranks[descriptor])
        return sorted(lost)

    def close(self) -> None:
        """Closes all connections; the other ends take this rank for dead."""
        sockets = [*self._greetings, *self._connections.values()]
        if self._listener is not None:
            sockets.append(self._listener)
        for one in sockets:
            with suppress(OSError):
                one.close()
        self._listener = None
        self._greetings.clear()
        self._connections.clear()

    def _accept(self) -> None:
        while self._listener is not None and len(self._greetings) <= self._world_size:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            connection.setblocking(False)
            self._greetings.append(connection)
        for connection in list(self._greetings):
            try:
                greeting = connection.recv(_GREETING.size)
            except BlockingIOError:
                continue
            except OSError:
                greeting = b""
            self._greetings.remove(connection)
            token, rank = (
                _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (b"", 0)
            )
            if hmac.compare_digest(token, self._token) and 0 < rank < self._world_size:
                self._keep(rank, connection)
            else:
                connection.close()
        while len(self._greetings) > self._world_size:  # strangers that say nothing
            self._greetings.pop(0).close()

    def _keep(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, number in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)
        connection.setblocking(False)
        self._connections[rank] = connection


def _find_host(is_first: bool) -> str:
    """A name or address by which the others reach this machine."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return socket.gethostname()
    if is_first:
        return master
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, but selects the outgoing interface
        return str(probe.getsockname()[0])


_all: weakref.WeakSet[Liveness] = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_all):
        one.close()


os.register_at_fork(after_in_child=_close_all)
