"""SIGTERM in the midst of a save ends the process after the commit, if that is asked for."""

import os
import signal
import threading
import time

import pytest
import torch

import bytecheckpoint as bcp
from shared.errors import ConfigError

from ..faulty_storage import before, held, slow


def end(act, handler=None):
    """Status of a process, the leader of a group, that acts and then sleeps."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
            act()
            time.sleep(60)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end_in_a_save(path, *, handler=None, finish=True, stage="arena"):
    """Status of a process whose whole group gets SIGTERM while it writes."""

    def act():
        ckpt = bcp.Checkpointer(path, finish_on_sigterm=finish, stage=stage)
        go = path.with_name(f"{path.name}-go")
        with held(go):
            handle = ckpt.save(1, {"x": torch.ones(3)})
            assert not handle.committed.done()
            if finish:
                threading.Timer(0.3, go.touch).start()
            os.killpg(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    return end(act, handler)


@pytest.mark.parametrize("stage", ["arena", "fork"])
def test_a_save_is_finished_before_the_process_ends(tmp_path, stage):
    assert end_in_a_save(tmp_path / "waited", stage=stage) == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path / "waited") as ckpt:
        assert ckpt.steps() == [1]
    assert end_in_a_save(tmp_path / "ended", finish=False, stage=stage) == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path / "ended") as ckpt:
        assert ckpt.steps() == []


def test_the_handler_before_is_called_after_the_commit(tmp_path):
    def handler(number, frame):
        os._exit(40 + len(list(tmp_path.glob("step_*/manifest*"))))

    assert end_in_a_save(tmp_path, handler=handler) == 41


def test_a_signal_while_a_save_is_made_ready_waits_for_it(tmp_path, monkeypatch):
    start = threading.Thread.start

    def act():
        def interrupted(thread):
            start(thread)
            if thread.name == "bytecheckpoint-save":
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        ckpt = bcp.Checkpointer(tmp_path, finish_on_sigterm=True)
        with slow(0.2):
            ckpt.save(1, {"x": torch.ones(3)})
            time.sleep(60)

    assert end(act) == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]


def test_a_lock_that_the_interrupted_code_holds_and_the_save_needs_blocks_neither(tmp_path):
    def act():
        ckpt = bcp.Checkpointer(tmp_path, finish_on_sigterm=True)
        lock = threading.Lock()

        def wait_for_lock(*_):
            with lock:
                pass

        with before("write", wait_for_lock):
            with lock:
                ckpt.save(1, {"x": torch.ones(3)})
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    assert end(act) == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]


@pytest.mark.parametrize("first", [signal.SIG_DFL, lambda number, frame: os._exit(41)])
def test_a_later_handler_may_call_this_one(tmp_path, first):
    def act():
        ckpt = bcp.Checkpointer(tmp_path, finish_on_sigterm=True)
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        with slow(0.2):
            ckpt.save(1, {"x": torch.ones(3)})
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    assert end(act, first) == (41 if callable(first) else -signal.SIGTERM)
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]


def test_close_installs_the_handler_before(tmp_path):
    first = signal.getsignal(signal.SIGTERM)
    with bcp.Checkpointer(tmp_path, finish_on_sigterm=True):
        assert signal.getsignal(signal.SIGTERM) != first
    assert signal.getsignal(signal.SIGTERM) == first


def test_another_thread_is_refused(tmp_path):
    caught = []

    def make():
        with pytest.raises(ConfigError, match="expected the main thread") as error:
            bcp.Checkpointer(tmp_path, finish_on_sigterm=True)
        caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(caught) == 1
