"""A rank whose process ends is known within a second, whoever else connects and whatever it forked."""

import os
import signal
import socket
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint.ranks.liveness import Liveness
from bytecheckpoint.ranks.team import Team
from shared.comms import Group, RankPool
from shared.errors import CommError, RankFailure

from ..faulty_storage import deadly, slow

LONG = timedelta(seconds=60)


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    first = Liveness(0, 3)
    address = first.listen()
    others = [Liveness(rank, 3) for rank in (1, 2)]
    for other in others:
        other.connect(address)
    yield first, others, msgspec.msgpack.decode(address)
    for one in (first, *others):
        one.close()


def wait_for_lost(one, expected):
    deadline = time.monotonic() + 60
    while (lost := one.find_lost()) != expected:
        assert time.monotonic() < deadline, f"expected {expected}, got {lost}"
        time.sleep(0.01)


def test_both_sides_see_the_other_end(ends):
    first, (second, third), _ = ends
    assert first.find_lost() == second.find_lost() == third.find_lost() == []
    second.close()
    wait_for_lost(first, [1])
    first.close()
    wait_for_lost(third, [0])


def test_strangers_are_no_ranks(ends):
    first, (second, _), address = ends
    wrong_token, no_rank = bytes(32) + (1).to_bytes(4, "little"), (7).to_bytes(4, "little")
    for greeting in (b"", b"x", bytes(36), wrong_token, address["token"] + no_rank):
        with socket.create_connection(("127.0.0.1", address["port"])) as stranger:
            stranger.sendall(greeting)
            time.sleep(0.01)
            assert first.find_lost() == []
        time.sleep(0.01)
        assert first.find_lost() == []  # nor when it has gone
    second.close()
    wait_for_lost(first, [1])


@pytest.mark.parametrize("num_silent", [1, 9])
def test_strangers_that_say_nothing_keep_no_rank_out(monkeypatch, num_silent):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    first, second = Liveness(0, 2), Liveness(1, 2)
    data = first.listen()
    port = msgspec.msgpack.decode(data)["port"]
    silent = []
    for _ in range(num_silent):
        silent.append(socket.create_connection(("127.0.0.1", port)))
        assert first.find_lost() == []
    second.connect(data)
    assert first.find_lost() == []
    second.close()
    wait_for_lost(first, [1])
    for one in (first, *silent):
        one.close()


def test_a_fork_does_not_keep_a_rank_alive(ends):
    first, (second, _), _ = ends
    assert first.find_lost() == []
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        second.close()
        wait_for_lost(first, [1])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_without_a_way_to_connect_nothing_is_lost(monkeypatch, ends):
    def refuse(*args, **options):
        raise OSError("no ports")

    with monkeypatch.context() as broken:
        broken.setattr(socket, "create_server", refuse)
        address = Liveness(0, 2).listen()
    assert address == b""
    second = Liveness(1, 2)
    second.connect(address)
    ends[0].close()
    second.connect(msgspec.msgpack.encode(ends[2]))  # nobody listens there any more
    assert second.find_lost() == []


def wait_for_the_dead_and_the_slow(path):
    """What rank 0 is told when rank 1 is killed while rank 2 has not reported yet."""
    team = Team()
    team.watch()
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if team.rank == 2:
        team.announced("done", LONG)
        return
    with pytest.raises(CommError) as told:
        team.reports("own", LONG)
    path.write_text(str(told.value))
    team.announce("done", b"")


def test_a_slow_rank_is_not_named_with_a_dead_one(tmp_path):
    with pytest.raises(RankFailure, match="rank 1 of 3"), RankPool(3) as pool:
        pool.run(wait_for_the_dead_and_the_slow, tmp_path / "told")
    assert (tmp_path / "told").read_text().startswith("rank 1 of 3 died in the midst of a save")


def save_and_be_killed(path, stage, dying, call):
    """What the other rank is told when one is killed in a save, and how long that takes."""
    rank = dist.get_rank()
    ckpt = bcp.Checkpointer(path, stage=stage, timeout=LONG)
    own = {"own": torch.full((100,), float(rank)), "n": 2}
    ckpt.save(1, {f"r{rank}": own}).committed.result(20)
    is_child = stage == "fork"
    bad = nullcontext() if rank != dying else slow(30.0) if is_child else deadly(call)
    begin = time.monotonic()
    with bad:
        handle = ckpt.save(2, {f"r{rank}": own})
        if rank == dying and is_child:
            os.kill(os.getpid(), signal.SIGKILL)
        error = handle.committed.exception(50)
    waited_s = time.monotonic() - begin
    (path / f"told-{rank}").write_text(f"{type(error).__name__}\n{waited_s}\n{error}")


@pytest.mark.parametrize(
    ("stage", "dying", "call"),
    [
        ("arena", 1, "write"),
        ("fork", 1, ""),
        pytest.param("arena", 0, "publish", marks=pytest.mark.slow),
        pytest.param("fork", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_in_a_save_is_named_long_before_the_timeout(
    tmp_path, stage, dying, call
):
    with (
        pytest.raises(RankFailure, match=f"rank {dying} of 2"),
        RankPool(2, timeout=2 * LONG) as pool,
    ):
        pool.run(save_and_be_killed, tmp_path, stage, dying, call)
    kind, waited_s, text = (tmp_path / f"told-{1 - dying}").read_text().split("\n", 2)
    assert kind == "CommError"
    assert f"rank {dying} of 2 died in the midst of a save" in text
    assert float(waited_s) < 40, "the timeout is 60 s"
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]


class GoneStore:
    """A store whose host has ended: every call fails at once."""

    num_waits = 0

    def wait(self, *_):
        self.num_waits += 1
        raise RuntimeError("broken pipe")

    def check(self, *_):
        raise RuntimeError("broken pipe")


def wait_on_a_store_that_is_gone():
    store = GoneStore()
    with mock.patch.object(Group, "board", return_value=store):
        team = Team()
    with pytest.raises(CommError, match="the store of the process group is gone"):
        team.announced("done", LONG)
    return store.num_waits


def test_a_store_that_is_gone_is_told_at_once():
    with RankPool(1) as pool:
        assert pool.run(wait_on_a_store_that_is_gone).results == [1]
