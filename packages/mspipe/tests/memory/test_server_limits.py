"""What one client of the memory's server cannot take from the machine, or from the others."""

import socket
import struct
import time
from contextlib import suppress

import pytest
import torch

from mspipe import cli
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.remote_rows import RemoteRows
from mspipe.memory.server import MemoryServer, parse_address
from mspipe.memory.wire import Op, Wire
from shared.errors import CommError, ConfigError, DataError

FRESH = torch.tensor([0.0, -1.0, 0.5, 0.0, 7.0])
ROW_BYTES = 20


def connected(server, timeout=60):
    host, port = server.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=timeout)


def header(op, first=0, second=0):
    return struct.pack("<4sIQQ", b"MSP1", op, first, second)


def test_the_table_is_bounded():
    with MemoryServer(max_bytes=30 * ROW_BYTES) as server:
        with pytest.raises(DataError, match="at most 600 bytes, got 620 for 31 rows"):
            RemoteRows(server.address, 31, FRESH)
        client = RemoteRows(server.address, 20, FRESH)
        client.grow(30)
        with pytest.raises(DataError, match="start the server with a larger --max-bytes"):
            client.grow(31)
        assert client.num_rows == 30
        assert torch.equal(client.read(torch.tensor([29])), FRESH[None])
        client.close()


@pytest.mark.parametrize(
    ("max_bytes", "announced", "is_served"),
    [(600, header(Op.READ, 75), True), (600, header(Op.READ, 76), False),
     (None, header(Op.READ, (1 << 29) + 1), False), (1 << 40, header(Op.READ, (1 << 29) + 1), False),
     (600, header(Op.WRITE, 22), False)],
)  # fmt: skip
def test_a_request_is_bounded_before_it_is_received(max_bytes, announced, is_served):
    """Also without --max-bytes: what is announced is memory that is asked for."""
    with MemoryServer(max_bytes=max_bytes) as server, connected(server) as raw:
        raw.sendall(header(Op.HELLO, 20, len(FRESH)) + FRESH.numpy().tobytes())
        assert len(raw.recv(24, socket.MSG_WAITALL)) == 24
        raw.sendall(announced)
        if is_served:
            raw.settimeout(0.5)
            with pytest.raises(TimeoutError):  # it waits for the ids
                raw.recv(1)
        else:
            assert raw.recv(1) == b""


def test_connections_are_bounded_and_places_become_free():
    with MemoryServer(max_clients=3) as server:
        first = RemoteRows(server.address, 20, FRESH)  # two connections
        with pytest.raises((DataError, CommError)):
            RemoteRows(server.address, 20, FRESH)
        assert torch.equal(first.read(torch.tensor([3])), FRESH[None])
        first.close()
        deadline = time.monotonic() + 60
        while True:
            try:
                RemoteRows(server.address, 20, FRESH).close()
                break
            except (DataError, CommError):
                assert time.monotonic() < deadline, "no place became free"
                time.sleep(0.01)


def test_who_comes_too_many_is_told():
    with MemoryServer(max_clients=1) as server, connected(server), connected(server) as second:
        head = second.recv(24, socket.MSG_WAITALL)
        op, size = struct.unpack("<4xIQ8x", head)
        assert op == Op.ERROR
        told = second.recv(size, socket.MSG_WAITALL)
        assert told == b"expected at most 1 connections; close some, or raise max_clients"
        assert second.recv(1) == b""


@pytest.mark.parametrize("sent", [b"", header(Op.HELLO, 20, 5)[:10], header(Op.HELLO, 20, 5)])
def test_who_never_says_hello_is_dropped(sent):
    with MemoryServer(timeout_s=0.1) as server, connected(server) as raw, suppress(ConnectionError):
        raw.sendall(sent)  # an error if it has been dropped before
        assert raw.recv(1) == b""


def test_a_header_that_trickles_is_dropped():
    with MemoryServer(timeout_s=0.5) as server, connected(server) as raw:
        begin, ended = time.monotonic(), None
        raw.settimeout(0.4)
        for byte in header(Op.HELLO, 20, 5):
            try:
                raw.sendall(bytes([byte]))
                if raw.recv(1) == b"":
                    ended = time.monotonic() - begin
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                ended = time.monotonic() - begin
                break
        assert ended is not None, "24 bytes took 9.6 s, and the header was waited for"


class Brief(Wire):
    """Waits for a hello as long as it is told, and briefly for the beginnings of what follows."""

    num_silences = 0

    def receive_header(self, *, may_idle=False):
        if may_idle:
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000)
            )
        return super().receive_header(may_idle=may_idle)

    def _receive_some(self, buffer):
        try:
            return super()._receive_some(buffer)
        except BlockingIOError:
            Brief.num_silences += 1
            raise


def test_a_client_may_be_silent_between_requests(monkeypatch):
    monkeypatch.setattr("mspipe.memory.server.Wire", Brief)
    with MemoryServer() as server:
        client = RemoteRows(server.address, 20, FRESH)
        before, deadline = Brief.num_silences, time.monotonic() + 60
        while Brief.num_silences < before + 10:  # each of two connections has some of them
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert torch.equal(client.read(torch.tensor([3])), FRESH[None])
        client.reset()
        client.close()


@pytest.mark.parametrize(
    "limits", [{"max_bytes": 0}, {"max_clients": 0}, {"timeout_s": 0.0}, {"timeout_s": -1.0}]
)
def test_limits_that_make_no_sense(limits):
    with pytest.raises(ConfigError, match="max_bytes and max_clients of at least 1"):
        MemoryServer(**limits)


def test_the_command_line_passes_its_limits_on(monkeypatch, capsys):
    made = []

    class Made:
        def __init__(self, *args, **limits):
            made.append((args, limits))
            raise ConfigError("made")

    monkeypatch.setattr("mspipe.memory.server.MemoryServer", Made)
    args = ["--max-bytes", "2KiB", "--max-clients", "7", "--timeout-s", "5"]
    assert cli.main(["serve-memory", "--bind", "127.0.0.1:0", *args]) == 1
    limits = {"max_bytes": 2048, "max_clients": 7, "timeout_s": 5.0, "key": None}
    assert made == [(("127.0.0.1", 0), limits)]
    assert cli.main(["serve-memory", "--max-bytes", "many"]) == 1
    assert "expected a size" in capsys.readouterr().err


def test_a_client_sends_no_more_than_servers_take():
    with MemoryServer() as server:
        client = RemoteRows(server.address, 20, FRESH)
        count = (1 << 32) // 28 + 1
        ids = torch.zeros(1, dtype=torch.int64).expand(count)
        with pytest.raises(DataError, match=r"at most 4,294,967,296 bytes at once, .*; split it"):
            client.write(ids, FRESH.expand(count, -1))
        client.close()


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("0.0.0.0:7000", ("0.0.0.0", 7000)),
        ("[::1]:7123", ("::1", 7123)),
        ("::1:7123", ("::1", 7123)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_may_be_of_either_kind(bind, address):
    assert parse_address(bind) == address


@pytest.mark.parametrize(
    "bind", ["[::1:7000", "::1]:7000", "[]:7000", "7000", ":7000", "[::1]", "host:", "host:x"]
)
def test_half_an_address_is_refused(bind):
    with pytest.raises(ConfigError, match="bind: expected host:port or"):
        parse_address(bind)


def test_a_server_listens_on_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with MemoryServer(*parse_address("[::1]:0")) as server:
        assert server.address.startswith("tcp://[::1]:")
        memory = NodeMemory(3, 2, 1, place=server.address)
        assert memory.version == 0
        memory.close()
