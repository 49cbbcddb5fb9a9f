"""SIGTERM in the midst of a save ends the process after the commit, if that is asked for."""

import os
import signal
import threading
import time

import pytest
import torch

import bytecheckpoint as bcp
from shared.errors import ConfigError

from ..faulty_storage import slow


def end_in_a_save(path, *, handler=None, finish=True):
    """Status of a process that gets SIGTERM while it writes."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
            ckpt = bcp.Checkpointer(path, finish_on_sigterm=finish)
            with slow(0.5):
                handle = ckpt.save(1, {"x": torch.ones(3)})
                assert not handle.committed.done()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_save_is_finished_before_the_process_ends(tmp_path):
    assert end_in_a_save(tmp_path / "waited") == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path / "waited") as ckpt:
        assert ckpt.steps() == [1]
    assert end_in_a_save(tmp_path / "ended", finish=False) == -signal.SIGTERM
    with bcp.Checkpointer(tmp_path / "ended") as ckpt:
        assert ckpt.steps() == []


def test_the_handler_before_is_called_after_the_commit(tmp_path):
    def handler(number, frame):
        os._exit(40 + len(list(tmp_path.glob("step_*/manifest*"))))

    assert end_in_a_save(tmp_path, handler=handler) == 41


def test_close_installs_the_handler_before(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with bcp.Checkpointer(tmp_path, finish_on_sigterm=True):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


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
