"""A server with a key serves those alone who prove it, and says what is wrong to others."""

import hmac
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mspipe import cli
from mspipe.memory import shared_key
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.remote_rows import RemoteRows
from mspipe.memory.server import MemoryServer
from mspipe.memory.wire import Op
from shared.errors import CommError, ConfigError, DataError

FRESH = torch.tensor([0.0, -1.0, 0.5, 0.0, 7.0])
KEY, OTHER = b"0123456789abcdef", b"0123456789abcdeF"


@pytest.fixture(autouse=True)
def _no_key_around(monkeypatch):
    for name in ("MSPIPE_KEY", "MSPIPE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with MemoryServer(key=KEY) as server:
        yield server


def connected(server):
    host, port = server.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def header(op, first=0, second=0):
    return struct.pack("<4sIQQ", b"MSP1", op, first, second)


def answered(raw):
    op, size, _ = struct.unpack("<4xIQQ", raw.recv(24, socket.MSG_WAITALL))
    return Op(op), raw.recv(size, socket.MSG_WAITALL).decode() if op == Op.ERROR else ""


def test_who_has_the_key_is_served(server):
    client = RemoteRows(server.address, 20, FRESH, key=KEY)
    client.write(torch.tensor([3]), torch.ones(1, 5))
    assert torch.equal(client.read(torch.tensor([3, 4])), torch.stack([torch.ones(5), FRESH]))
    client.close()


@pytest.mark.parametrize(
    ("key", "told"), [(OTHER, "got another"), (KEY + b"0", "got another"), (None, "got none")]
)
def test_others_are_told_and_change_nothing(server, key, told, caplog):
    owner = RemoteRows(server.address, 20, FRESH, key=KEY)
    with pytest.raises(DataError, match=f"expected this server's key, {told}; .* MSPIPE_KEY_FILE"):
        RemoteRows(server.address, 30, FRESH, key=key)
    assert "refused a client" in caplog.text
    assert KEY.decode() not in caplog.text
    assert owner.version == 0
    owner.grow(21)
    assert owner.num_rows == 21
    owner.close()


def test_a_key_that_the_server_has_not_is_named():
    with (
        MemoryServer() as server,
        pytest.raises(DataError, match="this server has no key; start it with --key-file"),
    ):
        RemoteRows(server.address, 20, FRESH, key=KEY)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE, Op.RESET, Op.GROW, Op.PROOF])
def test_nothing_is_asked_before_the_proof(server, op):
    RemoteRows(server.address, 20, FRESH, key=KEY).close()
    with connected(server) as raw:
        raw.sendall(header(op, 1, 1))
        assert raw.recv(24) == b""


def test_a_greeting_is_answered_once_and_says_nothing(server):
    owner = RemoteRows(server.address, 20, FRESH, key=KEY)
    owner.reset()
    with connected(server) as raw:
        raw.sendall(header(Op.PING))
        assert raw.recv(24, socket.MSG_WAITALL) == header(Op.OK)
        raw.sendall(header(Op.PING))
        assert raw.recv(1) == b""
    owner.close()


def test_a_stranger_makes_the_server_take_no_memory(server):
    with connected(server) as raw:
        raw.sendall(header(Op.HELLO, 20, 1 << 28))
        assert raw.recv(24) == b""


def test_proof_is_the_hmac_of_a_challenge_that_comes_once(server):
    seen = []
    for _ in range(2):
        with connected(server) as raw:
            raw.sendall(header(Op.CHALLENGE))
            assert answered(raw)[0] == Op.OK
            challenge = raw.recv(32, socket.MSG_WAITALL)
            proof = hmac.new(KEY, challenge, "sha256").digest()
            raw.sendall(header(Op.PROOF, 32) + proof)
            assert answered(raw)[0] == Op.OK
        seen.append((challenge, proof))
    assert seen[0] != seen[1]
    with connected(server) as raw:  # what was overheard is of no use
        raw.sendall(header(Op.CHALLENGE))
        answered(raw)
        raw.recv(32, socket.MSG_WAITALL)
        raw.sendall(header(Op.PROOF, 32) + seen[0][1])
        op, text = answered(raw)
        assert (op, "got another" in text) == (Op.ERROR, True)
        assert raw.recv(1) == b"", "each guess takes a connection"


def test_a_challenge_is_answered_in_time_or_dropped():
    with MemoryServer(key=KEY, timeout_s=0.1) as server, connected(server) as raw:
        raw.sendall(header(Op.CHALLENGE))
        answered(raw)
        raw.recv(32, socket.MSG_WAITALL)
        assert raw.recv(1) == b""


def test_comparison_takes_the_same_time_whatever_differs(monkeypatch):
    compared = []
    monkeypatch.setattr(
        shared_key.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    challenge = shared_key.new_challenge()
    right = shared_key.answer_to(challenge, KEY)
    assert shared_key.is_answer(right, challenge, KEY)
    assert not shared_key.is_answer(right, challenge, OTHER)
    assert [len(a) for pair in compared for a in pair] == [32] * 4


def test_key_is_read_from_the_file_named_nearest(tmp_path, monkeypatch):
    for name in ("given", "named"):
        (tmp_path / name).write_text(f"{name} {'k' * 16}\n")
    assert shared_key.read_key() is None
    monkeypatch.setenv("MSPIPE_KEY", "said " + "k" * 16)
    assert shared_key.read_key() == b"said " + b"k" * 16
    monkeypatch.setenv("MSPIPE_KEY_FILE", str(tmp_path / "named"))
    assert shared_key.read_key() == b"named " + b"k" * 16
    assert shared_key.read_key(tmp_path / "given") == b"given " + b"k" * 16


@pytest.mark.parametrize(
    ("content", "told"), [(None, "expected a file with the key"), ("short\n", "16 bytes, got 5"), ("", "got 0")]
)  # fmt: skip
def test_key_that_protects_nothing_is_refused(tmp_path, content, told, capsys):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        shared_key.read_key(path)
    args = ["serve-memory", "--bind", "127.0.0.1:0", "--key-file", str(path)]
    assert cli.main(args) == 1
    assert told in capsys.readouterr().err


def test_short_key_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("MSPIPE_KEY", "short")
    with pytest.raises(ConfigError, match="MSPIPE_KEY: expected a key of at least 16 bytes, got 5"):
        shared_key.read_key()
    with pytest.raises(ConfigError, match="got 5"):
        MemoryServer(key=b"short")


def test_processes_share_a_key_that_no_command_line_shows(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    command = [sys.executable, "-m", "mspipe", "serve-memory", "--bind", "127.0.0.1:0"]
    server = subprocess.Popen(
        [*command, "--key-file", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        place = server.stdout.readline().split()[-1]
        assert KEY not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        with pytest.raises(DataError, match="got none"):
            NodeMemory(20, 4, 4, place=place)
        monkeypatch.setenv("MSPIPE_KEY_FILE", str(path))
        memory = NodeMemory(20, 4, 4, place=place)
        assert memory.read(torch.tensor([1])).memory.shape == (1, 4)
        memory.close()
        monkeypatch.setenv("MSPIPE_KEY_FILE", "")
        monkeypatch.setenv("MSPIPE_KEY", OTHER.decode())
        with pytest.raises((DataError, CommError), match="got another"):
            NodeMemory(20, 4, 4, place=place)
    finally:
        server.terminate()
        server.communicate()
