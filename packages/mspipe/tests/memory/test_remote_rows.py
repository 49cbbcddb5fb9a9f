import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mspipe.memory import remote_rows
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.remote_rows import RemoteRows
from mspipe.memory.rows import LocalRows
from mspipe.memory.server import MemoryServer
from mspipe.memory.wire import Op
from shared.errors import CommError, ConfigError, DataError, MeshyardError

FRESH = torch.tensor([0.0, -1.0, 0.5, 0.0, 7.0])
CPU = torch.device("cpu")


@pytest.fixture
def server():
    with MemoryServer() as server:
        yield server


@pytest.fixture
def open_client(server):
    clients = []

    def opened(num_rows=20, fresh=FRESH, **settings):
        clients.append(RemoteRows(server.address, num_rows, fresh, **settings))
        return clients[-1]

    yield opened
    for client in clients:
        client.close()


def host_and_port(address):
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


def header(op, first=0, second=0):
    return struct.pack("<4sIQQ", b"MSP1", op, first, second)


def rows_of(*values):
    return torch.stack([torch.full((len(FRESH),), float(value)) for value in values])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.lists(st.integers(0, 10**6), max_size=60)),
        st.tuples(st.just("write"), st.lists(st.integers(0, 10**6), max_size=30)),
        st.tuples(st.just("grow"), st.integers(0, 40)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=12,
)


@given(steps=steps, num_rows=st.integers(1, 30))
def test_same_as_local_rows(steps, num_rows):
    with MemoryServer() as server:
        ours, model = RemoteRows(server.address, num_rows, FRESH), LocalRows(num_rows, FRESH, CPU)
        for at, (what, given) in enumerate(steps):
            if what == "read":
                ids = torch.tensor(given, dtype=torch.int64) % model.num_rows
                assert torch.equal(ours.read(ids), model.read(ids))
            elif what == "write":
                ids = (torch.tensor(given, dtype=torch.int64) % model.num_rows).unique()
                rows = torch.randn(
                    len(ids), len(FRESH), generator=torch.Generator().manual_seed(at)
                )
                ours.write(ids, rows)
                model.write(ids, rows)
            elif what == "grow":
                ours.grow(given)
                model.grow(max(given, model.num_rows))
            else:
                ours.reset()
                model.reset()
            assert (ours.num_rows, ours.version) == (model.num_rows, model.version)
        every = torch.arange(model.num_rows)
        assert torch.equal(ours.read(every), model.read(every))
        ours.close()


def test_more_rows_than_a_server_copies_at_once():
    """2,500 rows of 8 KB, asked in an order of their own: more than any buffer between the two holds."""
    rows = torch.arange(2500.0)[:, None].expand(-1, 2000).contiguous()
    asked = torch.randperm(2500, generator=torch.Generator().manual_seed(0))
    with MemoryServer() as server:
        client = RemoteRows(server.address, 2500, torch.zeros(2000))
        client.write(torch.arange(2500), rows)
        assert torch.equal(client.read(asked), rows[asked])
        client.close()


def test_two_clients_see_one_table(open_client):
    one, other = open_client(), open_client()
    one.write(torch.tensor([3, 19]), rows_of(3, 19))
    assert torch.equal(
        other.read(torch.tensor([19, 3, 0])), torch.cat([rows_of(19, 3), FRESH[None]])
    )
    other.write(torch.tensor([0]), rows_of(1))
    assert (one.version, other.version) == (1, 2)


def test_rows_that_are_no_plain_piece_of_memory(open_client):
    client = open_client()
    rows = torch.arange(10.0).view(5, 2).t().requires_grad_()
    client.write(torch.tensor([9, 4, 7, 1])[::2], rows)
    assert torch.equal(client.read(torch.tensor([9, 7])), rows)
    assert torch.equal(client.read(torch.tensor([9, 4, 7])[2::2]), rows[1:])


def test_bits_arrive_as_they_were(open_client):
    client = open_client()
    odd = torch.tensor([[float("nan"), -0.0, float("inf"), 1e-45, -1.0]])
    odd.view(torch.int32)[0, 4] = -3  # a NaN that bears a number
    client.write(torch.tensor([2]), odd)
    found = client.read(torch.tensor([2]))
    assert torch.equal(found.view(torch.int32), odd.view(torch.int32))


def test_returning_client_finds_rows_and_version(open_client):
    client = open_client()
    client.write(torch.tensor([5]), rows_of(5))
    client.grow(30)
    client.close()
    for num_rows in (20, 30):
        back = open_client(num_rows)
        assert (back.num_rows, back.version) == (30, 1)
        assert torch.equal(back.read(torch.tensor([5])), rows_of(5))


@pytest.mark.parametrize(
    ("num_rows", "fresh", "told"),
    [
        (21, FRESH, "expected 20 rows, got 21"),
        (20, FRESH[:4], "expected rows of 5 words, got 4"),
        (20, FRESH + 1, "the same at first"),
    ],
)
def test_mismatch_is_refused(open_client, num_rows, fresh, told):
    client = open_client()
    with pytest.raises(DataError, match=told):
        open_client(num_rows, fresh)
    assert torch.equal(client.read(torch.tensor([0])), FRESH[None])


@pytest.mark.parametrize("bad", [-1, 20])
def test_ids_out_of_range_change_nothing(open_client, bad):
    client = open_client()
    ids = torch.tensor([1, bad])
    with pytest.raises(DataError, match=r"in \[0, 20\)"):
        client.read(ids)
    with pytest.raises(DataError, match=r"in \[0, 20\)"):
        client.write(ids, rows_of(1, 2))
    assert torch.equal(client.read(torch.tensor([1])), FRESH[None])
    assert open_client().version == 0


def test_rows_of_another_shape_are_not_sent(open_client):
    client = open_client()
    with pytest.raises(DataError, match=r"expected rows \[1, 5\], got \[1, 4\]"):
        client.write(torch.tensor([1]), torch.zeros(1, 4))


@pytest.mark.parametrize("num_rows", [1 << 44, 1 << 62, (1 << 64) - 1])
def test_more_rows_than_memory_holds_are_refused(open_client, num_rows):
    client = open_client()
    with pytest.raises(DataError):
        client.grow(num_rows)
    assert torch.equal(client.read(torch.tensor([19])), FRESH[None])


@pytest.mark.parametrize("num_sent", [10, 24, 30, 40, 79])
def test_client_that_dies_in_a_write_changes_nothing(server, open_client, num_sent):
    client = open_client()
    message = header(Op.WRITE, 2) + struct.pack("<qq", 1, 2) + bytes(40)
    assert len(message) == 80
    with socket.create_connection(host_and_port(server.address)) as raw:
        raw.sendall(message[:num_sent])
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(1) == b"", "the server hangs up once it knows"
    assert torch.equal(client.read(torch.tensor([1, 2])), FRESH.expand(2, -1))
    assert open_client().version == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: memory\r\n\r\n",
        struct.pack("<4sIQQ", b"MSP1", 99, 0, 0),
        header(Op.WRITE, 1 << 62),
        header(Op.READ, (1 << 64) - 1),
        header(Op.OK, 1),
    ],
)
def test_garbage_ends_its_connection_only(server, open_client, garbage):
    client = open_client()
    with socket.create_connection(host_and_port(server.address)) as raw:
        raw.sendall(garbage)
        with suppress(ConnectionResetError):  # where the server did not read all of it
            assert raw.recv(1) == b""
    assert torch.equal(client.read(torch.tensor([1])), FRESH[None])


def test_nothing_is_answered_before_hello(server):
    with socket.create_connection(host_and_port(server.address)) as raw:
        raw.sendall(header(Op.RESET))
        assert raw.recv(1) == b""


def test_reads_beside_writes(open_client):
    """The two connections do not hold each other up, and never mix answers."""
    client = open_client(5_000)
    ids = torch.arange(5_000)
    client.write(ids, torch.zeros(5_000, 5))
    errors = []

    def write():
        try:
            for value in range(1, 60):
                client.write(ids, torch.full((5_000, 5), float(value)))
        except MeshyardError as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    newest = 0.0
    while writer.is_alive():
        found = client.read(ids)
        assert float(found.min()) >= newest, "what was read once is not undone"
        newest = float(found[:, 0].min())
    writer.join()
    assert not errors
    assert client.version == 60
    assert bool((client.read(ids) == 59).all())


# Faults ------------------------------------------------------------------------------------------


SERVE = """
from mspipe.memory.server import MemoryServer
from mspipe.memory.wire import Op
server = MemoryServer()
print(server.address, flush=True)
server.serve_forever()
"""


def test_killed_server_is_named():
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            check_killed(process, process.stdout.readline().strip())
        finally:
            process.kill()


def check_killed(process, address):
    client = RemoteRows(address, 200_000, FRESH, timeout_s=10)
    ids = torch.arange(200_000)
    caught = []

    def read():
        try:
            while True:
                client.read(ids)
        except CommError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    process.kill()
    reader.join(timeout=60)
    assert address in str(caught[0])
    assert "read of 200000 rows" in str(caught[0])
    with pytest.raises(CommError, match="reset"):
        client.reset()
    client.close()


class Silent:
    """Answers a greeting and hello and nothing more."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.accepted = []
        self.asked = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        for _ in range(2):
            sock, _ = self.listener.accept()
            self.accepted.append(sock)
            sock.recv(24, socket.MSG_WAITALL)
            sock.sendall(header(Op.OK, 0, 0))
            sock.recv(24 + 4 * len(FRESH), socket.MSG_WAITALL)
            sock.sendall(header(Op.OK, 20, 0))
        self.accepted[0].recv(24)
        self.asked.set()

    def close(self):
        for sock in (self.listener, *self.accepted):
            sock.close()


@pytest.fixture
def silent():
    silent = Silent()
    yield silent
    silent.close()


def test_silent_server_is_given_up(silent):
    client = RemoteRows(silent.address, 20, FRESH, timeout_s=2)  # for its hello too
    begin = time.monotonic()
    with pytest.raises(CommError, match=rf"{silent.address}.*read of 1 rows.*within 2 s"):
        client.read(torch.tensor([1]))
    assert time.monotonic() - begin < 25, "the default is 30 s"
    with pytest.raises(CommError):
        client.read(torch.tensor([1]))
    client.close()


def test_close_ends_a_read_that_waits(silent):
    client = RemoteRows(silent.address, 20, FRESH)
    caught = []

    def read():
        try:
            client.read(torch.tensor([1]))
        except CommError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert silent.asked.wait(60)
    begin = time.monotonic()
    client.close()
    reader.join(timeout=60)
    assert time.monotonic() - begin < 25, "the read would wait for 30 s"
    assert "closed at this end" in str(caught[0])
    client.close()  # and a second time


def test_closed_server_hangs_up(open_client, server):
    client = open_client()
    server.close()
    with pytest.raises(CommError, match="serve-memory"):
        client.read(torch.tensor([0]))
    server.close()


@contextmanager
def kept_port():
    """A port where nobody listens, which no other process is given meanwhile."""
    with socket.socket() as keeper:
        keeper.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as a server's, which may share it
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


def test_no_server_there():
    told = r"127.0.0.1:{}.*is `mspipe serve-memory` running"
    with kept_port() as port, pytest.raises(CommError, match=told.format(port)):
        RemoteRows(f"tcp://127.0.0.1:{port}", 20, FRESH, patience_s=0.2)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "expected a header of mspipe's protocol, got b'HTTP"),
        (None, "no answer in 0.5 s"),
        (b"", "the other end hung up"),
    ],
)
def test_something_else_that_listens_is_told_within_seconds(monkeypatch, sent, told):
    monkeypatch.setattr(remote_rows, "GREETING_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            sock, _ = listener.accept()
            sock.recv(24, socket.MSG_WAITALL)
            if sent is None:
                ended.wait(60)
            else:
                sock.sendall(sent)
            sock.close()

        ended = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(CommError) as caught:
            RemoteRows(address, 20, FRESH)
        assert time.monotonic() - begin < 25, "an answer to hello is waited for for 30 s"
        ended.set()
        thread.join()
    text = str(caught.value)
    assert text.startswith(
        f"{address}: expected a memory server, something else listens there and gave {told}"
    )
    assert text.endswith("; give the address that `mspipe serve-memory` prints")


def test_server_that_comes_late_is_met():
    found = []
    with kept_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        thread = threading.Thread(
            target=lambda: found.append(RemoteRows(place, 20, FRESH, patience_s=60))
        )
        thread.start()
        thread.join(0.1)
        with MemoryServer(port=port):
            thread.join()
            assert torch.equal(found[0].read(torch.tensor([7])), FRESH[None])
            found[0].close()


@pytest.mark.parametrize(
    "place",
    ["tcp://", "tcp://host", "tcp://host:", "tcp://:80", "tcp://host:x", "tcp://host:0",
     "tcp://host:70000", "tcp://[::1:80", "tcp://host:80/table", "udp://host:80"],
)  # fmt: skip
def test_malformed_address(place):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        RemoteRows(place, 20, FRESH)


def test_port_that_is_taken(server):
    _, port = host_and_port(server.address)
    with pytest.raises(CommError, match="another port"):
        MemoryServer(port=port)
    with pytest.raises(ConfigError, match="0 to 65535"):
        MemoryServer(port=1 << 16)


def test_timeout_of_nothing(server):
    with pytest.raises(ConfigError, match="timeout_s"):
        RemoteRows(server.address, 20, FRESH, timeout_s=0)


def test_node_memory_on_a_server(server):
    memory = NodeMemory(50, dim=3, mail_dim=2, place=server.address, start=4.0)
    nodes = torch.tensor([7, 49])
    given = torch.randn(2, 3), torch.tensor([5.0, 6.0]).double()
    mail = torch.randn(2, 2), torch.tensor([5.5, 6.5]).double()
    memory.write(nodes, *given, *mail)
    for found, wanted in zip(memory.read(nodes), (*given, *mail), strict=True):
        assert torch.equal(found, wanted)
    assert memory.read(torch.tensor([0])).memory_times.item() == 4.0
    with memory.preserved():
        memory.write(nodes, given[0] + 1, given[1])
    assert torch.equal(memory.read(nodes).memory, given[0])
    memory.close()
    again = NodeMemory(50, dim=3, mail_dim=2, place=server.address, start=4.0)
    assert torch.equal(again.read(nodes).memory, given[0])
    assert again.version == 3
    again.close()
