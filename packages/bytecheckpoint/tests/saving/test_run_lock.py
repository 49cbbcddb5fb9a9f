"""Of two jobs that save to one folder, the second is refused while the first one runs."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.saving.run_lock import RunLock
from shared.errors import ConfigError


def start(job):
    """Runs `job` in a child process until it returns or raises; returns its id and its answers."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            job(lambda data: os.write(write_end, data))
        except BaseException as error:  # noqa: BLE001 - for the parent
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    return pid, os.fdopen(read_end, "rb", buffering=0)


def ask_for_lock(path):
    """What another process that asks for the lock is told."""

    def job(answer):
        RunLock.take(os.fspath(path))
        answer(b"locked")

    pid, answers = start(job)
    os.waitpid(pid, 0)
    with answers:
        return answers.read().decode()


def test_a_second_job_is_refused_until_the_first_one_closes(tmp_path):
    run = tmp_path / "jobs" / "run7"
    with bcp.Checkpointer(run) as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).committed.result(60)
        # A child that was forked neither holds the lock nor takes it from the parent by ending.
        for _ in range(2):
            assert ask_for_lock(run).startswith("ConfigError")
    assert ask_for_lock(run) == "locked"


def test_a_job_is_refused_at_its_first_save_while_another_one_holds_the_folder(tmp_path):
    def other_job(answer):
        lock = RunLock.take(os.fspath(tmp_path))
        answer(b"locked")
        signal.pause()
        del lock

    pid, answers = start(other_job)
    try:
        assert answers.read(6) == b"locked"
        with bcp.Checkpointer(tmp_path) as ckpt:
            with pytest.raises(ConfigError, match="a running process does"):
                ckpt.save(1, {"x": torch.ones(3)})
            assert os.listdir(tmp_path) == []
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ckpt.save(1, {"x": torch.ones(3)}).committed.result(60)
            assert ckpt.steps() == [1]
    finally:
        answers.close()


def test_one_process_shares_its_lock_under_all_names_of_a_folder(tmp_path):
    run, alias = tmp_path / "run", tmp_path / "alias"
    run.mkdir()
    alias.symlink_to(run)
    held, other = RunLock.take(os.fspath(run)), RunLock.take(os.fspath(alias))
    assert held is other


def test_the_lock_is_held_until_the_process_is_gone(tmp_path):
    """Finalizers run before the functions registered first, as a save may still be under way."""
    script = tmp_path / "job.py"
    script.write_text(
        "import atexit, os, sys\n"
        "def ask():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            RunLock.take(sys.argv[1])\n"
        "        except ValueError:\n"
        "            os._exit(7)\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "atexit.register(ask)\n"
        "from bytecheckpoint.saving.run_lock import RunLock\n"
        "lock = RunLock.take(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "7\n"


def test_ranks_without_a_process_group_are_told_what_is_missing(tmp_path, monkeypatch):
    with bcp.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).committed.result(60)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert "init_process_group() before the first save" in ask_for_lock(tmp_path / "run")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert "a running process does" in ask_for_lock(tmp_path / "run")
