"""Ranks that are forked must not differ from fresh ones in what a user can see."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from shared.comms import RankPool
from shared.comms.launch import forking
from shared.errors import RankFailure

LIMIT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    """Templates of this file start quicker without what others' ranks need."""
    for name in ("torch._dynamo", "numba", "transformers.modeling_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def parent() -> int:
    return os.getppid()


def surroundings() -> dict:
    return {
        "folder": os.getcwd(),
        "cores": os.sched_getaffinity(0),
        "value": os.environ.get("MESHYARD_TESTED"),
        "leads": os.getsid(0) == os.getpid(),
        "descriptors": sorted(kind_of(fd) for fd in os.listdir("/proc/self/fd")),
    }


def kind_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0].split("meshyard")[0]
    except OSError:
        return "gone"  # that of the listing itself


def has_imported(name: str) -> bool:
    return name in sys.modules


def drawn() -> tuple[float, float, float]:
    return float(np.random.random()), random.random(), float(torch.rand(()))


def pool_of_a_fork() -> int:
    """What a pool answers that is opened in a process which this one has forked."""
    child = os.fork()
    if not child:
        with RankPool(1, timeout=LIMIT) as pool:
            os._exit(pool.run(int, "7").results[0])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def printing() -> None:
    sys.stdout.write("printed by a rank\n")
    sys.stderr.write("complained of by a rank\n")


def killing_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.02)


@pytest.mark.slow
def test_pools_of_one_environment_have_one_template(monkeypatch):
    with RankPool(2, timeout=LIMIT) as pool:
        first = pool.run(parent).results
    with RankPool(1, timeout=LIMIT) as pool:
        assert {*first, *pool.run(parent).results} == {first[0]}
    assert first[0] != os.getpid()
    assert is_running(first[0])
    with RankPool(1, timeout=LIMIT, env={"MESHYARD_TESTED": "mine"}) as pool:
        assert pool.run(parent).results == [os.getpid()]
        assert pool.run(surroundings).results[0]["value"] == "mine"
    monkeypatch.setenv("MESHYARD_TESTED", "ours")
    with RankPool(1, timeout=LIMIT) as pool:
        assert pool.run(parent).results != first[:1]
        assert pool.run(surroundings).results[0]["value"] == "ours"


def test_ranks_have_imported_the_heavy_modules_that_their_parent_has(monkeypatch):
    monkeypatch.setenv("MESHYARD_TESTED", "without heavy modules")
    with RankPool(1, timeout=LIMIT) as pool:
        assert pool.run(has_imported, "numba").results == [False]
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    monkeypatch.setenv("MESHYARD_TESTED", "with what its parent has")
    with RankPool(1, timeout=LIMIT) as pool:
        assert pool.run(has_imported, "numba").results == [True]


def test_forked_ranks_have_what_fresh_ones_have(tmp_path, monkeypatch):
    with RankPool(1, timeout=LIMIT):
        pass  # its template has started in another folder, on all cores
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with (
            RankPool(1, timeout=LIMIT) as forked,
            RankPool(1, timeout=LIMIT, env={"MESHYARD_OTHER": "1"}) as fresh,
        ):
            (found, expected) = (pool.run(surroundings).results[0] for pool in (forked, fresh))
    finally:
        os.sched_setaffinity(0, cores)
    assert expected["folder"] == str(tmp_path)
    assert expected["cores"] == {min(cores)}
    assert expected["leads"]
    assert found == expected


def test_ranks_draw_different_numbers():
    with RankPool(3, timeout=LIMIT) as pool:
        found = [*pool.run(drawn).results, drawn()]
    assert all(len(set(numbers)) == 4 for numbers in zip(*found, strict=True)), found


def test_ranks_print_where_the_parent_writes_errors_now(capfd):
    with RankPool(1, timeout=LIMIT) as pool:
        pool.run(printing)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "printed by a rank" in captured.err
    assert "complained of by a rank" in captured.err


@pytest.mark.slow
def test_a_template_that_is_killed_ends_its_ranks_and_is_replaced(monkeypatch):
    # Pools of other tests, which may be open in this process, keep the template of their environment.
    monkeypatch.setenv("MESHYARD_TESTED", "a template to be killed")
    with (
        pytest.raises(RankFailure, match="running killing_its_parent: killed by SIGKILL"),
        RankPool(2, timeout=LIMIT) as pool,
    ):
        pool.run(killing_its_parent)
    for _ in range(2):
        with RankPool(1, timeout=LIMIT) as pool:
            assert pool.run(drawn).results


@pytest.mark.slow
def test_pools_outlive_templates_that_are_no_longer_wanted():
    with ExitStack() as stack:
        pools = [
            stack.enter_context(RankPool(1, timeout=LIMIT, threads_per_rank=threads))
            for threads in (5, 6, 7)  # numbers that no other pool of this process has open
        ]
        templates = [pool.run(parent).results[0] for pool in pools]
        assert len(set(templates)) == 3
    wait_until_gone(templates[0])
    assert is_running(templates[-1])


@pytest.mark.slow
def test_a_start_that_fails_leaves_other_pools_alone(monkeypatch):
    def gone() -> str:
        raise FileNotFoundError("the folder is gone")

    with RankPool(1, timeout=LIMIT) as pool:
        with monkeypatch.context() as patch, RankPool(2, timeout=LIMIT) as other:
            patch.setattr(os, "getcwd", gone)
            with RankPool(2, timeout=LIMIT) as fresh:
                assert fresh.run(parent).results == [os.getpid()] * 2
            assert len(other.run(drawn).results) == 2
        assert pool.run(int, "3").results == [3]


@pytest.mark.slow
def test_a_template_may_start_for_longer_than_a_message_may_take(monkeypatch):
    monkeypatch.setenv("MESHYARD_TESTED", "a template that imports torch for seconds")
    with RankPool(1, timeout=timedelta(seconds=1)) as pool:
        assert pool.run(int, "3").results == [3]


def test_a_start_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(forking, "START_S", 0.05)
    monkeypatch.setenv("MESHYARD_TESTED", "another template")
    pool = RankPool(1, timeout=timedelta(seconds=0.05))
    with pytest.raises(RankFailure, match=r"rank 0 of 1 failed starting: .* in 0.05 s"), pool:
        pass


@pytest.mark.slow
def test_a_thread_that_blocks_signals_has_ranks_that_end(monkeypatch):
    monkeypatch.setenv("MESHYARD_TESTED", "yet another template")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        with RankPool(1, timeout=LIMIT) as pool:
            (pid,) = pool.pids
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_until_gone(pid)


@pytest.mark.slow
def test_a_forked_process_opens_pools_of_its_own():
    with RankPool(1, timeout=LIMIT) as pool:
        assert pool.run(pool_of_a_fork).results == [7]


def test_what_a_rank_started_ends_with_it_and_not_with_the_pool():
    with RankPool(2, timeout=LIMIT) as pool:
        child, _ = pool.run(with_child).results
        os.kill(pool.pids[0], signal.SIGKILL)
        wait_until_gone(child)


def with_child() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


SCRIPT = """
import os, time
from shared.comms import RankPool

if __name__ == "__main__":
    with RankPool(1) as pool:
        print(*pool.run(os.getppid).results, flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "time.sleep(1000)",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_template_ends_with_its_process(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        template = int(process.stdout.readline())
        assert template != process.pid
        if "sleep" in end:
            process.kill()
        process.wait(60)
        wait_until_gone(template)
        assert process.stderr.read() == ""


SCARCE = """
import os
fork = os.fork
def refused():
    os.fork = fork
    raise BlockingIOError(11, "too many processes")
os.fork = refused
"""


@pytest.mark.slow
def test_a_template_runs_any_entry_point_and_outlives_a_fork_that_the_system_refuses(tmp_path):
    (tmp_path / "meshyard_scarce.py").write_text(SCARCE)
    (tmp_path / "meshyard_entry.py").write_text(
        "import os, socket, sys\n"
        "def main(args):\n"
        "    words = [*args[1:], str(os.getppid())]\n"
        "    socket.socket(fileno=int(args[0])).sendall(' '.join(words).encode())\n"
        "    sys.exit(0)\n"
    )
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    given = {"cores": {0}, "modules": ["meshyard_scarce"], "entry": "meshyard_entry"}
    with ours, theirs:
        assert forking.fork(theirs.fileno(), [0], env, 60.0, **given) is None
        told = []
        for number in (7, 8):
            forked = forking.fork(theirs.fileno(), [0, "a", number], env, 60.0, **given)
            assert forked is not None, "a template that was begun anew refuses again"
            told.append(ours.recv(100).split())
            assert forked.wait(30.0) is not None
    assert [words[:2] for words in told] == [[b"a", b"7"], [b"a", b"8"]]
    assert told[0][2] == told[1][2]
