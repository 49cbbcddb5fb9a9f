"""What several of hybridflow's test files share."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from shared.comms import RankPool


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Models of tests are so small that threads wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _patience():
    """A rank that is slow to answer after another has raised is no reason to end processes in common."""
    from hybridflow.workers import controller

    before, controller.CANCEL_S = controller.CANCEL_S, 60.0
    yield
    controller.CANCEL_S = before


@pytest.fixture(scope="session")
def two_processes():
    """Started once, as each imports torch."""
    import hybridflow as hy

    with hy.Workers.local(2, timeout=timedelta(seconds=100)) as workers:
        yield workers


@pytest.fixture(scope="session")
def ranks():
    """Four ranks for functions that exchange messages, and leave them as they were."""
    with RankPool(4, timeout=timedelta(seconds=100)) as pool:
        yield pool


@pytest.fixture
def two(two_processes):
    """Two processes without groups, for tests that leave them alive."""
    yield two_processes
    two_processes.clear()


@pytest.fixture
def pair(two):
    """The two as one pool."""
    return two.pool(2)


@pytest.fixture
def pools(two):
    """The two as pools of one rank each."""
    return two.pool(1), two.pool(1)


@pytest.fixture(scope="module")
def ray_start(tmp_path_factory):
    """Ray for a module's tests, with a HOME of its own."""
    ray = pytest.importorskip("ray", reason="the ray engine needs Ray")
    with pytest.MonkeyPatch.context() as patch:
        # Ray writes a token there.
        home = tmp_path_factory.getbasetemp() / "home"  # one for all tests: Ray reads it once
        home.mkdir(exist_ok=True)
        patch.setenv("HOME", str(home))
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="session")
def torchrun_job():
    """Starts workers as `torchrun` does, this process being that of rank 0.

    A context manager of (num_ranks, ranks_per_machine), which gives the workers and the processes
    of the other ranks. Ranks of two machines are on one, and believe that they are not.
    """
    return _torchrun_job


@contextmanager
def _torchrun_job(num_ranks, ranks_per_machine):
    import hybridflow as hy

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def variables(rank):
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank % ranks_per_machine),
            "LOCAL_WORLD_SIZE": str(ranks_per_machine),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    path = os.pathsep.join(path for path in sys.path if path)
    script = "from hybridflow import Workers; Workers.torchrun(); raise SystemExit('went on')"
    others = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, **variables(rank)},
        )
        for rank in range(1, num_ranks)
    ]
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables(0).items():
                patch.setenv(name, value)
            workers = hy.Workers.torchrun(timeout=timedelta(seconds=100))
        with workers:
            yield workers, others
    finally:
        for process in others:
            try:
                process.wait(20)
            finally:
                process.kill()
