"""What supervisors of several hosts say to each other; the test speaks for the other side."""

import json
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from swift.membership.channel import ControlChannel

HEARTBEAT_S, LIMIT_S = 20.0, 60.0
HELLO = {
    "kind": "hello", "host": 1, "start": "a", "world_size": 2, "num_ranks": 1,
    "heartbeat_s": HEARTBEAT_S, "starts": [1],
}  # fmt: skip
WAITS = """
import json, os, pathlib, sys, time
with open(pathlib.Path(sys.argv[1], "environments"), "a") as file:
    file.write(json.dumps([os.environ.get(name) for name in sys.argv[2:]]) + "\\n")
time.sleep(600)
"""
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Peer:
    """A connection to a supervisor, and what it has said that was not read yet."""

    def __init__(self, channel):
        self.channel, self._unread = channel, []

    def send(self, **message):
        self.channel.send(message)

    def hear(self, kind):
        """The next message of a kind; those before it are passed over."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            while self._unread:
                message = self._unread.pop(0)
                if message["kind"] == kind:
                    return message
            assert not self.channel.is_closed, f"it ended before it said anything of kind {kind}"
            self._unread += self.channel.receive()
        raise AssertionError(f"nothing of kind {kind} was said")

    def hear_status(self):
        """The answer about the run's state, and the kinds of what was said before it."""
        self.send(kind="status")
        kinds = []
        while True:
            while self._unread:
                message = self._unread.pop(0)
                if "processes" in message:
                    return message, kinds
                kinds.append(message["kind"])
            assert not self.channel.is_closed
            self._unread += self.channel.receive()


def connect(port):
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return Peer(ControlChannel.connect(("127.0.0.1", port), 1.0))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def options(folder, port, host, script="waits.py"):
    (folder / "waits.py").write_text(WAITS)
    return [
        *("-n", 1, "--spares", 0, "--nnodes", 2, "--node-rank", host, "--master-port", port),
        *("--heartbeat", HEARTBEAT_S, script, folder, *NAMES),
    ]


@contextmanager
def first_host(driver, folder, *more, script="waits.py"):
    """A first host whose script waits; what it prints by its end comes into the list."""
    port, printed = free_port(), []
    driver.begin(folder, *more, *options(folder, port, 0, script))
    try:
        yield port, printed
    finally:
        driver.signal(signal.SIGINT)
        printed.append(driver.end(status=130))


def test_hosts_that_were_started_otherwise_are_refused_and_strangers_change_nothing(
    driver, tmp_path
):
    with first_host(driver, tmp_path) as (port, printed):
        for changes, text in [
            ({"world_size": 3}, "expected -n 1, 2 ranks in all and --heartbeat 20, as the first"),
            (
                {"num_ranks": 2},
                "got -n 2, 2 ranks in all and --heartbeat 20; start it with the same",
            ),
            ({"heartbeat_s": 5.0}, "got -n 1, 2 ranks in all and --heartbeat 5; start it with"),
            ({"host": 2}, "host 2: expected a --node-rank of its own, 1 to 1, got one that"),
        ]:
            peer = connect(port)
            peer.send(**{**HELLO, **changes})
            assert text in peer.hear("refuse")["reason"]
        one = connect(port)
        one.send(**HELLO)
        one.send(kind="started", name="1.0", rank=1)
        other = connect(port)
        other.send(**{**HELLO, "start": "b"})
        assert "host 1: expected a --node-rank of its own" in other.hear("refuse")["reason"]
        for line in [b"[1]", b"7", b"{}", b'{"kind": "hello"}', b'{"kind": ["hello"]}', b"GET /"]:
            with socket.create_connection(("127.0.0.1", port), 20) as stranger:
                stranger.sendall(line + b"\n")
                assert stranger.recv(1) == b""
        stranger = connect(port)
        stranger.send(kind="gone", name="1.0", how="was killed", status=None, silent_s=0.0)
        answer, _ = stranger.hear_status()
        assert [(one["name"], one["rank"]) for one in answer["processes"]] == [
            ("0.0", 0),
            ("1.0", 1),
        ]
        assert answer["num_recoveries"] == 0
    assert printed == ["meshyard-swift: interrupted; start again by the same command\n"]


def test_a_host_that_does_not_come_is_named_once(driver, tmp_path):
    with first_host(driver, tmp_path, "--wait", 3) as (port, printed):
        peer = connect(port)
        for _ in range(3):
            peer.hear_status()
            time.sleep(0.3)
    told = "the first step waits for hosts that have not come: 1 of 0 to 1; start each with"
    assert printed[0].count(told) == 1


def test_a_rank_of_another_host_lost_before_the_first_step_is_started_again_there(driver, tmp_path):
    with first_host(driver, tmp_path) as (port, printed):
        peer = connect(port)
        peer.send(**HELLO)
        peer.send(kind="started", name="1.0", rank=1)
        peer.send(kind="gone", name="1.0", how="was killed by 9", status=None, silent_s=0.0)
        assert peer.hear("start")["rank"] == 1
        # Its host is lost before it did, and comes back with spares.
        peer.channel.close()
        back = connect(port)
        back.send(**{**HELLO, "starts": []})
        assert back.hear("start")["rank"] == 1
        back.send(kind="started", name="1.1", rank=1)
        # Another supervisor in its place starts its ranks itself.
        back.channel.close()
        new = connect(port)
        new.send(**{**HELLO, "start": "b"})
        assert [kind for _ in range(2) for kind in new.hear_status()[1] if kind == "start"] == []
        new.send(kind="started", name="1.0", rank=1)
        new.send(kind="gone", name="1.0", how="was killed by 11", status=None, silent_s=0.0)
        assert new.hear("start")["rank"] == 1
    assert printed[0].count("before the first step; it is started again\n") == 3


def test_a_host_that_does_not_come_back_before_the_first_step_ends_the_run(driver, tmp_path):
    port = free_port()
    driver.begin(tmp_path, "--wait", 0.2, *options(tmp_path, port, 0))
    peer = connect(port)
    peer.send(**HELLO)
    peer.send(kind="started", name="1.0", rank=1)
    peer.channel.close()
    printed = driver.end(status=1)
    assert "no process came in 0.2 s for rank 1; start the run again" in printed


READY = """
import time
from swift.membership.member import Membership
Membership.of_process().report_ready({"training": {"can_shrink": True}})
time.sleep(600)
"""


def test_a_host_that_brings_ranks_when_the_run_has_begun_is_told_to_come_with_spares(
    driver, tmp_path
):
    (tmp_path / "ready.py").write_text(READY)

    def say_ready(peer, name, rank):
        peer.send(kind="started", name=name, rank=rank)
        ready = {"kind": "ready", "fingerprint": {"training": {"can_shrink": True}}}
        peer.send(kind="from", name=name, message=ready)
        said = peer.hear("to")
        assert (said["name"], said["message"]["kind"]) == (name, "world")
        return said["message"]

    with first_host(driver, tmp_path, script="ready.py") as (port, printed):
        peer = connect(port)
        peer.send(**HELLO)
        assert say_ready(peer, "1.0", 1)["rank"] == 1
        peer.channel.close()
        restarted = connect(port)
        restarted.send(**{**HELLO, "start": "b"})
        assert "the run goes on without its ranks" in restarted.hear("fence")["why"]
        back = connect(port)
        back.send(**{**HELLO, "start": "b", "starts": []})
        world = say_ready(back, "1.1", None)
        assert (world["rank"], world["epoch"], world["recovery"]) == (1, 2, 1)
        assert [one["host"] for one in world["lost"]] == [1]
    assert "rank 1 ended with its host's supervisor; the others wait for a spare" in printed[0]


def other_host(driver, folder):
    """Another host and the connection that it opens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        driver.begin(folder, *options(folder, listener.getsockname()[1], 1))
        return listener.dup(), accept(listener)


def accept(listener):
    listener.settimeout(LIMIT_S)
    connection = listener.accept()[0]
    return Peer(ControlChannel.over(connection))


def environments(folder, num):
    """Variables of the first processes, in the order in which they came to the script."""
    deadline = time.monotonic() + LIMIT_S
    file = folder / "environments"
    while not file.exists() or len(lines := file.read_text().splitlines()) < num:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_another_host_starts_what_it_is_told_and_ends_when_it_is_refused(driver, tmp_path):
    listener, peer = other_host(driver, tmp_path)
    hello = peer.hear("hello")
    assert {**HELLO, "start": hello["start"]} == hello
    assert peer.hear("started") == {"kind": "started", "name": "1.0", "rank": 1}
    assert environments(tmp_path, 1) == [["1", "0", "1", "2", "1"]]
    peer.send(kind="start", rank=1)
    assert peer.hear("started") == {"kind": "started", "name": "1.1", "rank": 1}
    assert environments(tmp_path, 2)[1] == ["1", "1", "1", "2", "1"]
    peer.send(kind="fence", why="is told so")
    with listener:
        back = accept(listener)
    assert back.hear("hello") == {**hello, "starts": []}
    assert back.hear("started") == {"kind": "started", "name": "1.2", "rank": None}
    assert environments(tmp_path, 3)[2] == [None, "0", "1", "2", "1"]
    back.send(kind="refuse", reason="this one is not wanted")
    printed = driver.end(status=1)
    assert "meshyard-swift: host 1 is told so\n" in printed
    assert printed.endswith("meshyard-swift: this one is not wanted\n")
