"""Memory and plan of the first save, made ahead of it."""

import gc
import threading
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from shared.errors import DataError

NUM_BYTES = 48 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_for_image():
    for thread in threading.enumerate():
        if thread.name == "bytecheckpoint-image":
            thread.join()


def is_planned_by(handle):
    handle.committed.result()
    return handle.trace.seconds("plan") > 0


def training(num_bytes=1 << 16):
    """A model and its AdamW after a step, of about so many bytes."""
    model = torch.nn.Linear(64, num_bytes // (3 * 4 * 64), bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_prepared_save_plans_nothing_and_finds_its_memory_mapped(tmp_path):
    state = training(NUM_BYTES)
    gc.collect()  # what is given back meanwhile would be missing
    before = resident_bytes()
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.prepare(state)
        wait_for_image()
        assert resident_bytes() - before > 0.9 * NUM_BYTES
        assert not is_planned_by(ckpt.save(1, state))
        expected = state["model"].weight.detach().clone()
        state["model"].weight.data.zero_()
        ckpt.load(1, state)
        assert torch.equal(state["model"].weight, expected)


def test_what_sees_a_training_state_before_its_first_save_prepares(tmp_path):
    state = training()
    with bcp.Checkpointer(tmp_path, every_n=2) as ckpt:
        assert ckpt.save(1, state).is_skipped
        assert not is_planned_by(ckpt.save(2, state))
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.load_latest(state)
        assert not is_planned_by(ckpt.save(3, state))


def test_a_load_without_an_optimizer_takes_no_memory(tmp_path):
    state = training()
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.load_latest({"model": state["model"]})
        assert is_planned_by(ckpt.save(2, state))


def test_a_state_that_has_changed_since_is_planned_anew(tmp_path):
    state = training()
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.prepare({"model": state["model"]})
        assert is_planned_by(ckpt.save(1, state))
        expected = state["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
        state["optimizer"].state_dict()["state"][0]["exp_avg"].zero_()
        ckpt.load(1, state)
        assert torch.equal(state["optimizer"].state_dict()["state"][0]["exp_avg"], expected)


def test_a_state_that_cannot_be_saved_is_refused_by_prepare_and_told_by_a_skipped_save(
    tmp_path, caplog
):
    with bcp.Checkpointer(tmp_path, every_n=2) as ckpt:
        assert ckpt.save(1, {"x": object()}).is_skipped
        assert "nothing is prepared for the first save" in caplog.text
        with pytest.raises(DataError):
            ckpt.prepare({"x": object()})
