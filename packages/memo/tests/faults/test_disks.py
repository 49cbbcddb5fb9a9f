"""Stores on disks that are full, slow, deleted or broken, and stores that are too small."""

import gc
import multiprocessing
import os
import resource
import signal
import threading

import pytest

from memo import DoesNotFit, Plan, apply
from memo.runtime.moving.threads import ThreadMover
from memo.runtime.stores import FileStore
from shared.errors import DataError

from ..runtime.models import assert_same_step, make_model, plain_step, train
from .steps import HALF, loss_of

pytestmark = pytest.mark.unchecked  # models are trained


def test_a_disk_that_fills_up_is_named(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: writes fail in the same place."""
    model = make_model("llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with apply(model, Plan.fixed(alpha=1.0, store=f"file:{tmp_path}")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
        try:
            with pytest.raises(DataError, match=f"{tmp_path}: expected a folder with room"):
                loss_of(model).backward()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        model.zero_grad()
        gc.collect()
        found = train(model)
    assert_same_step(found, plain_step("llama"))


def test_a_disk_with_too_little_room_is_refused_before_any_step(tmp_path):
    disk = os.statvfs(tmp_path)
    too_much = disk.f_blocks * disk.f_frsize * 4
    prediction = {"store_bytes": too_much}
    plan = Plan(layers=HALF.layers, store=f"file:{tmp_path}", prediction=prediction)
    model = make_model("llama")
    with pytest.raises(DataError, match=r"expected a folder with room for .* free\)"):
        apply(model, plan)
    assert "forward" not in vars(model.model.layers[0])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match="expected a folder with room"):
        apply(make_model("llama"), Plan.fixed(alpha=0.5, store=f"file:{tmp_path}/file"))


def test_a_store_whose_folder_is_deleted_goes_on(tmp_path):
    model, expected = make_model("llama"), plain_step("llama")
    folder = tmp_path / "store"
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{folder}")):
        assert os.listdir(folder) == [], "unlinked at once"
        folder.rmdir()
        assert_same_step(train(model), expected)


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    """Nothing is written until the first layer has waited for a while: then all is."""
    model = make_model("llama", num_layers=4)
    expected = train(model, num_batches=1)
    may_write, write, wait = threading.Event(), FileStore.write, ThreadMover.await_sent
    timer = threading.Timer(0.2, may_write.set)

    def slow(store, offset, data):
        may_write.wait()
        write(store, offset, data)

    def await_sent(mover, cargo):
        if timer.ident is None:
            timer.start()
        wait(mover, cargo)

    monkeypatch.setattr(FileStore, "write", slow)
    monkeypatch.setattr(ThreadMover, "await_sent", await_sent)
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{tmp_path}")) as run:
        found = train(model, num_batches=1)
        assert run.times.wait_s > 0.15
    timer.join()
    assert_same_step(found, expected)


def test_a_failing_read_reaches_the_training_loop(tmp_path, monkeypatch):
    model = make_model("llama")
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{tmp_path}")):
        loss = loss_of(model)
        with monkeypatch.context() as patch:

            def broken(*_):
                raise OSError(5, "Input/output error")

            patch.setattr("memo.runtime.stores.file.move_all", broken)
            with pytest.raises(DataError, match="Input/output error"):
                loss.backward()
        del loss
        found = train(model)
    assert_same_step(found, plain_step("llama"))


def die_within_a_step(folder):
    model = make_model("llama")
    with apply(model, Plan.fixed(alpha=1.0, store=f"file:{folder}")) as run:
        loss = loss_of(model)
        if loss.isfinite() and run.store_bytes > 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_no_file(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=die_within_a_step, args=(tmp_path,))
    child.start()
    child.join(100)
    assert child.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_too_small_says_so_and_training_goes_on_after():
    model, expected = make_model("llama"), plain_step("llama")
    with apply(model, Plan.fixed(alpha=0.5)) as run:
        assert_same_step(train(model), expected)
        needed = run.store_bytes
    plan = Plan(layers=HALF.layers, store_limit_bytes=needed)
    with apply(model, plan) as run:
        assert_same_step(train(model), expected)
        assert run.store_bytes == needed
        with pytest.raises(DoesNotFit, match="store in memory: expected at most"):
            loss_of(model, length=96)
        gc.collect()
        assert_same_step(train(model), expected)
        assert run.store_bytes <= needed
