"""A loop that is interrupted and run again in the same process, as a notebook's cell."""

import gc
import threading

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.saving.job import wait_for_saves

from ..faulty_storage import held


def run_cell(run, interrupted_at=None):
    """Trains five steps from the newest checkpoint; returns the step that it began from."""
    state = {"t": {"x": torch.zeros(8)}, "extra": {"step": 0}}
    ckpt = bcp.Checkpointer(run)
    loaded = ckpt.load_latest(state)
    for step in range(state["extra"]["step"] + 1, 6):
        state["t"]["x"] += 1
        state["extra"]["step"] = step
        ckpt.save(step, state)
        if step == interrupted_at:
            raise KeyboardInterrupt
    ckpt.close()
    assert torch.equal(state["t"]["x"], torch.full((8,), 5.0))
    return loaded


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_cell_that_is_run_again_waits_for_the_save_it_left_behind(tmp_path, is_linked):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with held(tmp_path / "go", "publish"):
        with pytest.raises(KeyboardInterrupt):
            run_cell(tmp_path / "run", interrupted_at=1)
        gc.collect()
        timer = threading.Timer(0.1, (tmp_path / "go").touch)
        timer.start()
        loaded = run_cell(tmp_path / ("link" if is_linked else "run"))
        timer.join()
    assert loaded == 1
    with bcp.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4, 5]


def test_saves_elsewhere_are_not_waited_for(tmp_path):
    with held(tmp_path / "go", "publish"):
        ckpt = bcp.Checkpointer(tmp_path / "run")
        handle = ckpt.save(1, {"x": torch.ones(3)})
        other = bcp.Checkpointer(tmp_path / "other")
        assert other.load_latest({"x": torch.ones(3)}) is None
        assert not handle.committed.done()
        (tmp_path / "go").touch()
        wait_for_saves(str(tmp_path / "run"))
        assert handle.committed.done()
        ckpt.close()
