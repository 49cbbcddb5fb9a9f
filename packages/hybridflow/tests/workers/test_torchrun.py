"""Workers under torchrun: what leads there, and what is left when something ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hybridflow import WorkerGroup, Workers
from hybridflow.workers.engines import torchrun
from hybridflow.workers.engines.torchrun_rank import Member, meeting_place
from shared.errors import ConfigError, RankFailure

from ..frail import Frail, rows
from ..processes import assert_gone, environment_of, with_variable

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def kept_port():
    """A port that no other process is given; a store may share it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


def _set_environment(monkeypatch, port, num_ranks=1):
    for name, value in zip(_NAMES, (0, num_ranks, 0, 1, "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, str(value))


# The start.


def test_a_script_that_torchrun_did_not_start_is_told_how_to(monkeypatch):
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError) as caught:
        Workers.torchrun()
    message = str(caught.value)
    assert "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT unset" in message
    assert "`torchrun --nproc-per-node 2 train.py`" in message
    assert "Workers.local(2)" in message


def test_ranks_of_one_agent_are_on_one_machine(monkeypatch):
    machines, hosts = [], []
    for rank, local_rank in enumerate((0, 1, 2, 0, 1)):
        values = (rank, 5, local_rank, 3 if rank < 3 else 2, "localhost", 1)
        for name, value in zip(_NAMES, values, strict=True):
            monkeypatch.setenv(name, str(value))
        place = Member.from_environment().place(1, "folder")
        machines.append(place.machine)
        hosts.append(place.host)
    assert machines == [0, 0, 0, 3, 3]
    assert hosts[:3] == ["localhost"] * 3
    assert set(hosts[3:]) <= {"127.0.0.1", "::1"}  # the way to localhost begins there


def test_a_second_controller_is_refused(monkeypatch, kept_port):
    _set_environment(monkeypatch, kept_port)
    store = meeting_place(timedelta(seconds=60))
    store.add("controllers", 1)
    with pytest.raises(ConfigError, match=r"a second Workers\.torchrun\(\).* calls it once"):
        Workers.torchrun()


class _Hasty:
    """A clock that only sleep moves on, and by far."""

    def __init__(self):
        self._now = 0.0

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        self._now += 1000 * seconds


@pytest.mark.parametrize(
    ("script", "how"), [("import time; time.sleep(60)", "no sign of it"), ("exit(3)", "exited: 3")]
)
def test_a_rank_that_does_not_come_up_is_named_in_time(monkeypatch, kept_port, script, how):
    _set_environment(monkeypatch, kept_port)
    started, popen = [], subprocess.Popen

    def start(command, **settings):
        assert "hybridflow.workers.engines.torchrun_rank" in command
        started.append(popen([sys.executable, "-c", script], start_new_session=True))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    if "sleep" in script:
        monkeypatch.setattr(torchrun, "time", _Hasty())
    with pytest.raises(RankFailure, match=rf"rank 0 of 1 did not come up \(.*{how}\)"):
        Workers.torchrun(timeout=timedelta(seconds=60))
    assert started[0].returncode is not None


def test_processes_that_do_not_meet_are_told_where(monkeypatch, kept_port):
    _set_environment(monkeypatch, kept_port, num_ranks=2)
    with pytest.raises(RankFailure, match=rf"within 1 s .*127\.0\.0\.1 at port {kept_port}"):
        Workers.torchrun(timeout=timedelta(seconds=1))


# Faults.


@pytest.mark.slow
def test_a_rank_that_raises_and_one_that_is_killed(torchrun_job):
    with torchrun_job(2, 2) as (workers, others):
        group = WorkerGroup(Frail, workers.pool(2))
        with pytest.raises(RankFailure) as caught:
            group.lose(rows(2)).result(60)
        message = str(caught.value)
        assert message.startswith("rank 0 of 2 raised in Frail.lose: LookupError: rank 0 lost")
        assert 'raise LookupError(f"rank {self.rank} lost its rows")' in message
        assert "rank 1 too: LookupError: rank 1 lost its rows" in message
        kept = group.grow(rows(2))
        kept.result(60)
        first, second = group.pid().result(60)
        assert first != os.getpid()
        assert second == others[0].pid
        folders = _folders(workers)
        assert len(folders) == 3
        future = group.sleep_for_ever()
        begin = time.monotonic()
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RankFailure, match="rank 1 of 2 died") as caught:
            future.result(30)
        assert time.monotonic() - begin < 1
        assert caught.value.rank == 1
        with pytest.raises(RankFailure, match="rank 1 of 2 died"):
            group.pid()
        assert float(kept.result()["y"].sum()) == 100_000
    assert_gone([first])
    assert not any(map(os.path.exists, folders))


@pytest.mark.slow
def test_a_rank_beside_the_controller_that_is_killed(torchrun_job):
    with torchrun_job(2, 1) as (workers, others):
        group = WorkerGroup(Frail, workers.pool(2))
        folders = _folders(workers)
        group.grow(rows(2)).result(60)
        first = group.pid().result(60)[0]
        future = group.sleep_for_ever()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RankFailure, match="rank 0 of 2 died"):
            future.result(30)
    assert others[0].returncode == 0  # so that torchrun blames the one that died
    assert not any(map(os.path.exists, folders))


@pytest.mark.slow
def test_a_rank_that_raises_frees_those_that_wait_for_it(torchrun_job, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.workers.controller.CANCEL_S", 2.0)
    with torchrun_job(2, 1) as (workers, others):
        group = WorkerGroup(Frail, workers.pool(2))
        pids = group.pid().result(60)
        future = group.hang_in_collective(str(tmp_path / "told"))
        with pytest.raises(RankFailure, match="ArithmeticError: rank 1 gives up") as caught:
            future.result(60)
        assert caught.value.rank == 1
    assert_gone(pids)
    assert others[0].returncode == 0


def _folders(workers):
    return [place.folder for place in workers.engine.store.places.values()]


# Whole jobs.

_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import hybridflow as hy

class Adder(hy.Worker):
    @hy.remote("dp")
    def add(self, batch, number):
        return hy.Batch(x=batch["x"] + number, y=torch.ones(len(batch), 20_000))

    @hy.remote()
    def places(self):
        return os.getpid(), os.environ["RANK"], os.environ["LOCAL_RANK"], self.num_ranks

    @hy.remote()
    def sleep_for_ever(self):
        time.sleep(3600)

def main(end):
    with hy.Workers.torchrun() as workers:
        adder = hy.WorkerGroup(Adder, workers.pool(workers.num_ranks))
        total = adder.add(adder.add(hy.Batch(x=torch.arange(5)), 10), 100)
        print("sum", total.result()["x"].tolist(), flush=True)
        for place in adder.places().result():
            print("rank", *place, flush=True)
        for place in workers.engine.store.places.values():
            print("folder", place.machine, place.folder, flush=True)
        if end == "raise":
            raise SystemError("the script gave up")
        if end == "hang":
            Path(sys.argv[2]).touch()
            adder.sleep_for_ever().result()
    print("after", flush=True)
"""
_GUARDED = f"{_SCRIPT}\nif __name__ == '__main__':\n    main(sys.argv[1])\n"


def _job(tmp_path, *options, script=_GUARDED, end="close"):
    """A torchrun command on a script, and the environment of its processes."""
    file = tmp_path / "train.py"
    file.write_text(script)
    path = os.pathsep.join(path for path in sys.path if path)
    env = {
        **{name: value for name, value in os.environ.items() if name not in _NAMES},
        "PYTHONPATH": path,
        "HYBRIDFLOW_TEST": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(file), end]
    return [*command, str(tmp_path / "hangs")], env


def _lines(output, word):
    return [line.split()[1:] for line in output.splitlines() if line.startswith(word)]


def _assert_nothing_left(tmp_path, output):
    folders = [folder for _, folder in _lines(output, "folder")]
    assert len(folders) == 3
    tag = f"HYBRIDFLOW_TEST={tmp_path}".encode()
    # All that torchrun started has inherited its environment.
    assert_gone(with_variable(tag))
    assert not any(map(os.path.exists, folders))


def _run(tmp_path, *options, **how):
    command, env = _job(tmp_path, *options, **how)
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.slow
def test_a_script_runs_once_on_all_ranks_of_one_machine(tmp_path):
    ran = _run(tmp_path, "--nproc-per-node", "2")
    assert ran.returncode == 0, ran.stderr
    assert _lines(ran.stdout, "sum") == [["[110,", "111,", "112,", "113,", "114]"]]
    ranks = _lines(ran.stdout, "rank")
    assert [rank[1:] for rank in ranks] == [["0", "0", "2"], ["1", "1", "2"]]
    assert [machine for machine, _ in _lines(ran.stdout, "folder")] == ["0"] * 3
    assert ran.stdout.count("after") == 1
    _assert_nothing_left(tmp_path, ran.stdout)


@pytest.mark.slow
def test_a_script_runs_once_on_two_machines(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command, env = _job(tmp_path, *options, "--local-addr", "127.0.0.1")
    agents = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        told = [agent.communicate(timeout=110) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], told
    output = "".join(out for out, _ in told)
    assert _lines(output, "sum") == [["[110,", "111,", "112,", "113,", "114]"]]
    ranks = _lines(output, "rank")
    assert [rank[1:] for rank in ranks] == [["0", "0", "2"], ["1", "0", "2"]]
    assert [machine for machine, _ in _lines(output, "folder")] == ["0", "0", "1"]
    _assert_nothing_left(tmp_path, output)


@pytest.mark.slow
def test_what_the_script_raises_is_what_torchrun_blames(tmp_path):
    ran = _run(tmp_path, "--nproc-per-node", "2", end="raise")
    assert ran.returncode == 1
    assert "SystemError: the script gave up" in ran.stderr
    blamed = ran.stderr.partition("Root Cause")[2]
    assert "rank      : 0 (local_rank: 0)" in blamed
    assert "after" not in ran.stdout
    _assert_nothing_left(tmp_path, ran.stdout)


@pytest.mark.slow
def test_workers_defined_in_a_script_without_a_guard_are_refused(tmp_path):
    ran = _run(tmp_path, "--nproc-per-node", "2", script=_SCRIPT + "\nmain('close')\n")
    assert ran.returncode == 1
    assert "under `if __name__ == '__main__':`" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_controller_that_ends_ends_the_job(tmp_path, number):
    command, env = _job(tmp_path, "--nproc-per-node", "2", end="hang")
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as agent:
        deadline = time.monotonic() + 100
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < deadline
            assert agent.poll() is None
            time.sleep(0.05)
        tag = f"HYBRIDFLOW_TEST={tmp_path}".encode()
        controller = next(
            pid
            for pid in with_variable(tag)
            if (found := environment_of(pid))
            and b"\0RANK=0\0" in found
            and b"torchrun_rank" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(controller, number)
        output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 1
    _assert_nothing_left(tmp_path, output)
