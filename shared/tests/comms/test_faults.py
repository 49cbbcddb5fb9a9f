"""What is left, and what is said, when a rank fails."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shared.comms import (
    Group,
    RankPool,
    Round,
    all_to_all_v,
    barrier,
    courier,
    post_rounds,
    scatter_v,
)
from shared.comms.courier import run_rounds
from shared.errors import CommError, ConfigError, DataError, RankFailure

LIMIT = timedelta(seconds=60)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def failure_of(num_ranks: int, function, *args, timeout: timedelta | None = None):
    """The failure of a run on a fresh pool; nothing of the pool may be left."""
    with RankPool(num_ranks, timeout=LIMIT) as pool:
        pids = pool.run(os.getpid).results
        assert pool.run(nothing).results == [None] * num_ranks  # ranks have this file now
        start = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            pool.run(function, *args, timeout=timeout)
        seconds = time.monotonic() - start
        with pytest.raises(ConfigError, match="closed, by a failed run"):
            pool.run(os.getpid)
    assert wait_until_gone(pids) == []
    assert seconds < LIMIT.total_seconds() / 2
    return caught.value


def nothing() -> None:
    pass


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def raising() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    barrier(Group.world())


def mistaken(errors: list[Exception]) -> None:
    """Each rank raises its own error, but None: then it waits for the others."""
    own = errors[dist.get_rank()]
    if own is not None:
        raise own
    barrier(Group.world())


def killed_in_a_round() -> None:
    group = Group.world()
    size, rank = group.world_size, group.rank
    # More than the sockets' buffers hold, so that nobody's round ends without its peer.
    message, landed = (torch.zeros(32 << 20, dtype=torch.uint8) for _ in range(2))

    def made(shift: int) -> torch.Tensor:
        if rank == 1 and shift == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return message

    rounds = [
        Round(
            send_to=(rank + shift) % size,
            send=lambda shift=shift: made(shift),
            recv_from=(rank - shift) % size,
            recv=landed,
        )
        for shift in range(1, size)
    ]
    post_rounds(group, rounds, "forward1").wait_all()


def killed_while_receiving() -> None:
    group = Group.world()
    message = torch.full((64 << 20,), group.rank, dtype=torch.uint8)
    if group.rank == 0:
        rounds = [Round(send_to=1, send=message + 1, recv_from=1, recv=None)]
        post_rounds(group, rounds, "backward2").wait_all()
    else:
        rounds = [Round(send_to=0, send=None, recv_from=0, recv=message.zero_())]
        post_rounds(group, rounds, "backward2")
        while message[0] == 0:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_an_exchange() -> None:
    group = Group.world()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with group.ledger.phase("backward1"):
        all_to_all_v(group, [torch.zeros(4)] * 2, [torch.zeros(4), torch.zeros(4)])


def be_slow_or_killed(rank: int, folder: Path) -> None:
    """Rank 2 is killed when rank 0 has begun, and rank 1 does nothing until rank 0 has been told."""
    if rank == 2:
        wait_for(folder / "begun")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(folder / "told")


def killed_before_its_part(folder: Path) -> None:
    group, end = Group.world(), courier.wait_for_end
    if group.rank:
        be_slow_or_killed(group.rank, folder)
        return

    def begun(*args):
        (folder / "begun").touch()  # all messages have started when the first is waited for
        end(*args)

    mock.patch.object(courier, "wait_for_end", begun).start()
    try:
        with group.ledger.phase("parts"):
            scatter_v(group, [torch.zeros(4)] * 3)
    finally:
        (folder / "told").touch()


def killed_while_messages_start(folder: Path) -> None:
    group = Group.world()
    if group.rank:
        be_slow_or_killed(group.rank, folder)
        return

    def packed():
        (folder / "begun").touch()
        wait_for(folder / "told")
        return torch.zeros(4)

    rounds = [
        Round(send_to=2, send=torch.zeros(4), recv_from=2, recv=None),
        Round(send_to=1, send=packed, recv_from=1, recv=None),
    ]
    try:
        run_rounds(group, rounds, "packing", "parts", at_once=True)
    finally:
        (folder / "told").touch()


def hanging() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def leaving() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def unpicklable():
    return (lambda: None) if dist.get_rank() == 1 else 0


def with_child() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    raise RuntimeError("child", child.pid)


@pytest.mark.parametrize(
    ("errors", "mistake"),
    [
        ([None, DataError("rows: expected 3, got 4")], "rows: expected 3, got 4"),
        ([FileNotFoundError(2, "gone", "a.csv"), None], "[Errno 2] gone: 'a.csv'"),
        # A lost message follows from something else, and a KeyError is a fault of ours.
        ([CommError("rank 1 did not answer"), ConfigError("lr: got -1")], "lr: got -1"),
        ([CommError("rank 1 did not answer"), KeyError("ours")], None),
    ],
)
def test_what_a_user_can_mend_is_told_apart_from_the_traceback(errors, mistake):
    failure = failure_of(2, mistaken, errors)
    assert failure.mistake == mistake
    assert "Traceback" in str(failure)


def test_raising_rank():
    failure = failure_of(2, raising)
    assert failure.rank == 1
    text = str(failure)
    assert text.startswith("rank 1 of 2 failed running raising")
    assert "KeyError: 'the reason'" in text
    assert "test_faults.py" in text
    assert "launch/rank.py" not in text.partition("rank 0 of 2")[0]
    assert "CommError: rank 0: barrier among ranks [0, 1] failed" in text


def test_rank_killed_in_the_middle_of_a_round():
    failure = failure_of(3, killed_in_a_round)
    assert failure.rank == 1
    text = str(failure)
    assert text.startswith("rank 1 of 3 failed running killed_in_a_round: killed by SIGKILL")
    # Rank 2 waits for rank 1 at once; rank 0 for rank 2, or for rank 1 in the next round.
    where = "failed in round {} of 2 of phase 'forward1'"
    assert re.search(f"CommError: rank 2: .* rank 1 {where.format(0)}", text)
    assert re.search(f"CommError: rank 0: .* rank [12] {where.format('[01]')}", text)
    assert "Rank 1 died, hangs or disagrees" in text


def test_sender_learns_of_a_peer_that_dies_in_the_middle_of_a_message():
    text = str(failure_of(2, killed_while_receiving))
    assert text.startswith("rank 1 of 2 failed running killed_while_receiving: killed by SIGKILL")
    assert "rank 1 failed in round 0 of 1 of phase 'backward2'" in text


def test_rank_killed_in_an_exchange_of_the_main_thread():
    text = str(failure_of(2, killed_in_an_exchange))
    assert "killed by SIGKILL" in text
    assert "rank 1 failed in round 0 of 1 of phase 'backward1' (all_to_all_v)" in text


def test_sender_learns_of_a_dead_peer_while_it_waits_for_a_slow_one(tmp_path):
    text = str(failure_of(3, killed_before_its_part, tmp_path))
    assert text.startswith("rank 2 of 3 failed running killed_before_its_part: killed by SIGKILL")
    assert "rank 2 failed in round 1 of 2 of phase 'parts' (scatter_v): its process has" in text


def test_sender_learns_of_a_peer_that_dies_while_its_messages_start(tmp_path):
    text = str(failure_of(3, killed_while_messages_start, tmp_path))
    assert "rank 2 failed in round 0 of 2 of phase 'packing' (parts): its process has" in text


def test_hanging_rank_is_stopped_and_its_place_told():
    failure = failure_of(2, hanging, timeout=timedelta(seconds=3))
    assert failure.rank == 1
    assert "rank 1 of 2 failed running hanging: did not finish" in str(failure)
    assert "within 3 s" in str(failure)
    assert "in hanging" in str(failure)


def test_rank_that_exits():
    failure = failure_of(2, leaving)
    assert failure.rank == 0
    assert "exited with 7" in str(failure)


def test_result_that_cannot_be_pickled():
    failure = failure_of(2, unpicklable)
    assert failure.rank == 1
    assert "TypeError: unpicklable returned a function that cannot be pickled" in str(failure)


def test_children_of_a_rank_end_with_it():
    text = str(failure_of(1, with_child))
    child = int(text.rpartition("('child', ")[2].rstrip(")"))
    assert wait_until_gone([child]) == []


def test_rank_killed_between_runs():
    with RankPool(2, timeout=LIMIT) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(
            RankFailure, match="rank 0 of 2 failed running getpid: killed by SIGKILL"
        ):
            pool.run(os.getpid)


def test_start_that_fails_says_so():
    pool = RankPool(1, timeout=LIMIT, prefix=[["false"]])
    with pytest.raises(RankFailure, match="rank 0 of 1 failed starting: exited with 1"), pool:
        pass


def test_failing_body_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids: list[int] = []

    def body() -> None:
        with RankPool(1, timeout=LIMIT) as pool:
            pids.extend(pool.pids)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        body()
    assert len(pids) == 1
    assert wait_until_gone(pids) == []
    assert list(tmp_path.iterdir()) == []


ORPHANS = """
import sys, time
from shared.comms import RankPool
with RankPool(2) as pool:
    print(*pool.pids, flush=True)
    {body}
"""


@pytest.mark.parametrize(
    "body",
    [
        "pool.run(time.sleep, 1000)",
        pytest.param("time.sleep(1000)", marks=pytest.mark.slow),
    ],
)
def test_dead_parent_leaves_no_rank(tmp_path, monkeypatch, body):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS.format(body=body))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert wait_until_gone(pids) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(list(tmp_path.glob("meshyard-*"))) == 1
    with pytest.raises(RankFailure), RankPool(1, timeout=LIMIT, prefix=[["false"]]):
        pass
    assert list(tmp_path.glob("meshyard-*")) == [], "the next pool removes a dead one's folder"
