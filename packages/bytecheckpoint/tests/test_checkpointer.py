"""A run's checkpoints: which are kept, which are found, and what a later save costs."""

import gc
import logging
import os
import secrets
import shutil
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.ranks.team import Team
from bytecheckpoint.saving.image import Image
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.local import LocalStorage
from shared.comms import Group
from shared.errors import ConfigError, RankFailure


def state(number=0):
    return {"x": torch.full((100,), float(number)), "n": number}


def folders(path):
    return sorted(int(one.name.removeprefix("step_")) for one in path.glob("step_*"))


def test_an_empty_folder_has_nothing_to_load(tmp_path):
    with bcp.Checkpointer(tmp_path / "none" / "yet") as ckpt:
        into = state(7)
        assert ckpt.steps() == []
        assert ckpt.load_latest(into) is None
        assert into["n"] == 7
        with pytest.raises(FileNotFoundError, match="step_00000003"):
            ckpt.load(3, into)


def test_every_nth_step_is_saved_and_the_newest_is_loaded(tmp_path):
    with bcp.Checkpointer(tmp_path, every_n=3) as ckpt:
        handles = [ckpt.save(step, state(step)) for step in range(8)]
        assert [handle.is_skipped for handle in handles] == [step % 3 > 0 for step in range(8)]
        for handle in handles:
            assert handle.staged.wait(60)
            assert handle.committed.result(60) is None
        assert ckpt.steps() == [0, 3, 6]
        into = state()
        assert ckpt.load_latest(into) == 6
        assert into["n"] == 6
        assert bool((into["x"] == 6).all())
        ckpt.load(3, into)
        assert into["n"] == 3


def test_steps_beyond_eight_digits_and_foreign_folders(tmp_path):
    (tmp_path / "step_00000009").mkdir()
    (tmp_path / "step_abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with bcp.Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (5, 123456789012, 99999999):
            ckpt.save(step, state(step)).committed.result()
        ckpt.close()  # removal follows the commit
        assert ckpt.steps() == [99999999, 123456789012]
        assert ckpt.load_latest(state()) == 123456789012
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step_abc").exists()


def test_only_the_newest_are_kept(tmp_path):
    with bcp.Checkpointer(tmp_path, keep=2) as ckpt:
        for step in range(5):
            ckpt.save(step, state(step))
            ckpt.close()  # removal follows the commit
            assert folders(tmp_path) == list(range(max(0, step - 1), step + 1))
    # Another process goes on, and knows of those that are there.
    with bcp.Checkpointer(tmp_path, keep=2) as ckpt:
        assert ckpt.load_latest(state()) == 4
        ckpt.save(5, state(5))
    assert folders(tmp_path) == [4, 5]


def files(path):
    return {one: one.stat().st_mtime_ns for one in path.rglob("*")}


@pytest.mark.parametrize("every_n", [1, 10])
def test_a_run_that_was_not_loaded_is_refused_before_anything_is_touched(tmp_path, every_n):
    with bcp.Checkpointer(tmp_path) as ckpt:
        for step in (10, 20):
            ckpt.save(step, state(step))
    before = files(tmp_path)
    with bcp.Checkpointer(tmp_path, keep=2, every_n=every_n) as ckpt:
        # The first call says so, even if its step would not be saved.
        for step in (1, 30):
            with pytest.raises(ConfigError, match=r"steps up to 20.*load_latest.*overwrite=True"):
                ckpt.save(step, state(-1))
        assert files(tmp_path) == before
        into = state()
        assert ckpt.load_latest(into) == 20
        assert into["n"] == 20
        ckpt.save(30, state(30)).committed.result(60)
    assert folders(tmp_path) == [20, 30]


@pytest.mark.parametrize("load", [lambda ckpt: ckpt.load_latest(state()), None])
def test_a_run_may_go_on_when_loaded_or_when_its_folder_was_empty(tmp_path, load):
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    with bcp.Checkpointer(tmp_path if load else tmp_path / "another") as ckpt:
        if load:
            load(ckpt)
        ckpt.save(3, state(3))
        ckpt.save(4, state(4))
    assert ckpt.steps() == ([1, 2, 3, 4] if load else [3, 4])


def save_anew(path):
    ckpt = bcp.Checkpointer(path)
    try:
        ckpt.save(1, {f"own{dist.get_rank()}": torch.ones(3)}).committed.result(60)
    except ConfigError as error:
        return str(error)
    return "saved"


def test_all_ranks_refuse_a_run_that_was_not_loaded(tmp_path, pool):
    assert pool.run(save_anew, tmp_path).results == ["saved", "saved"]
    one, two = pool.run(save_anew, tmp_path).results
    assert one == two
    assert "steps up to 1" in one


def test_a_run_begun_anew_with_overwrite_is_the_one_that_is_loaded(tmp_path):
    with bcp.Checkpointer(tmp_path) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, state(step))
    with bcp.Checkpointer(tmp_path, keep=2, overwrite=True) as ckpt:
        for step, left in ((15, [10, 15]), (20, [15, 20])):
            ckpt.save(step, state(-step))
            ckpt.close()
            assert ckpt.steps() == left
            into = state()
            assert ckpt.load_latest(into) == step
            assert into["n"] == -step


def test_a_failed_save_removes_nothing(tmp_path, monkeypatch):
    with bcp.Checkpointer(tmp_path, keep=1, on_error="warn") as ckpt:
        ckpt.save(1, state(1)).committed.result()

        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(commit, "commit", refuse)
            handle = ckpt.save(2, state(2))
            with pytest.raises(OSError, match="No space left"):
                handle.committed.result(60)
        assert ckpt.steps() == [1]
        ckpt.save(3, state(3))
        ckpt.close()
        assert ckpt.steps() == [3]


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("close", [False, True])
def test_a_failed_save_is_raised_once_by_the_next_or_by_close(tmp_path, monkeypatch, close):
    with bcp.Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as broken:
            broken.setattr(LocalStorage, "create", full_disk)
            ckpt.save(1, state(1))
            with pytest.raises(OSError, match="No space left") as raised:
                ckpt.close() if close else ckpt.save(2, state(2))
        assert raised.value.errno == 28
        if not close:
            assert "step 1 was not saved, and step 2 is not tried" in str(raised.value)
        assert ckpt.steps() == []
        ckpt.save(3, state(3))
    assert ckpt.steps() == [3]


def test_a_full_disk_is_raised_by_every_second_save(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "create", full_disk)
    ckpt = bcp.Checkpointer(tmp_path)
    raised = []
    for step in range(4):
        try:
            ckpt.save(step, state(step))
        except OSError:
            raised.append(step)
    assert raised == [1, 3]


def save_after_a_failure(path):
    """What each rank is told by the save after one that failed on rank 1 alone."""
    rank = dist.get_rank()
    own = {f"own{rank}": torch.ones(3)}
    with bcp.Checkpointer(path) as ckpt, pytest.MonkeyPatch.context() as broken:
        if rank == 1:
            broken.setattr(LocalStorage, "create", full_disk)
        ckpt.save(1, own)
        with pytest.raises(OSError, match="not saved") as raised:
            ckpt.save(2, own)
        broken.undo()
        ckpt.save(3, own)
    told = raised.value.errno, str(raised.value)
    return told, commit.list_steps(LocalStorage(path))


def test_all_ranks_raise_a_failed_save(tmp_path, pool):
    one, two = pool.run(save_after_a_failure, tmp_path).results
    assert one == two
    assert one[0][0] == 28
    assert "step 1 was not saved" in one[0][1]
    assert "rank 1 of 2" in one[0][1]
    assert one[1] == [3]


def test_failing_to_remove_the_old_is_tried_again(tmp_path, monkeypatch, caplog):
    with bcp.Checkpointer(tmp_path, keep=1) as ckpt:
        ckpt.save(1, state(1)).committed.result()
        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr(commit, "remove_checkpoint", lambda *_: 1 / 0)
            ckpt.save(2, state(2))
            ckpt.close()
        assert "removing old checkpoints failed" in caplog.text
        assert ckpt.steps() == [1, 2]
        ckpt.save(3, state(3))
        ckpt.close()
        assert ckpt.steps() == [3]


def test_a_step_that_exists_is_replaced_only_when_asked_to(tmp_path):
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1)).committed.result()
        failed = ckpt.save(1, state(2)).committed
        with pytest.raises(FileExistsError, match="step_00000001"):
            failed.result(60)
        into = state()
        ckpt.load(1, into)
        assert into["n"] == 1
        with pytest.raises(FileExistsError):
            ckpt.close()
        ckpt.save(2, state(3)).committed.result()
    with bcp.Checkpointer(tmp_path, overwrite=True) as ckpt:
        ckpt.save(1, state(4)).committed.result()
        ckpt.load(1, into)
        assert into["n"] == 4
    assert len(list((tmp_path / "step_00000001").glob("data-*"))) <= 2


def test_one_checkpoint_at_a_path(tmp_path):
    path = tmp_path / "one"
    with pytest.raises(FileNotFoundError, match="there is nothing; check the path"):
        bcp.load(path, state())
    bcp.save(path, state(1))
    with pytest.raises(FileNotFoundError, match=r"\] /no-such-checkpoint: expected a "):
        bcp.load("/no-such-checkpoint", state())
    with pytest.raises(FileExistsError, match="overwrite=True"):
        bcp.save(path, state(2))
    bcp.save(path, state(2), overwrite=True)
    into = state()
    assert bcp.load(path, into).step is None
    assert into["n"] == 2
    with bcp.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state())
    with pytest.raises(FileNotFoundError, match="folder of steps"):
        bcp.load(tmp_path / "run", state())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"keep": 0}, "keep"),
        ({"every_n": 0}, "every_n"),
    ],
)
def test_settings_out_of_range(tmp_path, options, word):
    with pytest.raises(ConfigError, match=word):
        bcp.Checkpointer(tmp_path, **options)


def test_a_negative_step_and_a_fork_without_files_are_refused(tmp_path):
    with bcp.Checkpointer(tmp_path) as ckpt, pytest.raises(ConfigError, match="-1"):
        ckpt.save(-1, state())
    with pytest.raises(ConfigError, match="fork"):
        bcp.Checkpointer("memory://run", stage="fork")


def counted(monkeypatch):
    """Counts what a save sends beside its one reduction."""
    calls = {"gather": 0, "scatter": 0, "all": 0, "maximum": 0}

    def counting(name):
        method = getattr(Team, name)

        def wrapper(self, *args):
            calls[name] += 1
            return method(self, *args)

        return wrapper

    for name in calls:
        monkeypatch.setattr(Team, name, counting(name))
    return calls


def plan_once(path):
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    with pytest.MonkeyPatch.context() as patch, bcp.Checkpointer(path) as ckpt:
        calls = counted(patch)

        def save(step, **more):
            before = dict(calls)
            whole = {"model": model, "optimizer": optimizer, "step": step, **more}
            ckpt.save(step, whole).committed.result()
            seen.append([calls[name] - before[name] for name in calls])

        save(1)
        save(2)
        model(torch.ones(4)).sum().backward()
        optimizer.step()  # now there is optimizer state
        save(3)
        optimizer.step()
        save(4)
        save(5, of_rank=rank)  # values by rank are no reason to plan
        save(6, x=torch.zeros(3))
        save(7, x=torch.ones(3))
        save(8, x=torch.ones(4))  # another shape
        save(9, x=torch.ones(4, dtype=torch.float64))
        save(10, y=torch.ones(4, dtype=torch.float64))
        save(11, y=model.weight)  # tied now
        save(12, y=model.weight, **({"own": torch.ones(2)} if rank == 1 else {}))
    for step in (3, 7, 9, 11):
        with bcp.open(path / f"step_{step:08d}") as checkpoint:
            assert checkpoint.extra["step"] == step
            if step == 7:
                assert checkpoint.read("x").tolist() == [1.0] * 3
            if step == 11:
                assert torch.equal(checkpoint.read("y"), checkpoint.read("model.weight"))
    return seen


PLANNED = [1, 3, 6, 8, 9, 10, 11]


def test_a_later_save_of_the_same_state_plans_nothing(tmp_path):
    seen = plan_once(tmp_path)
    assert [step for step, calls in enumerate(seen, 1) if calls[0]] == PLANNED
    assert all(calls == [0, 0, 0, 1] for step, calls in enumerate(seen, 1) if step in (2, 4, 5, 7))


def test_ranks_plan_together_even_if_only_one_has_something_new(tmp_path, pool):
    seen = pool.run(plan_once, tmp_path).results
    # Step 12 is new on rank 1 alone.
    assert [[s for s, calls in enumerate(of_rank, 1) if calls[0]] for of_rank in seen] == [
        [*PLANNED, 12]
    ] * 2
    assert all(seen[rank][step - 1] == [0, 0, 0, 1] for rank in (0, 1) for step in (2, 4, 5, 7))


def many_saves(path, num_saves):
    """What the store keeps of saves that are over."""
    with bcp.Checkpointer(path, keep=1) as ckpt:
        store = Group.control().board("bytecheckpoint")
        ckpt.save(0, state()).committed.result()
        dist.barrier()
        before = store.num_keys()
        for step in range(1, num_saves + 1):
            ckpt.save(step, state(step)).committed.result()
        dist.barrier()
        return store.num_keys() - before


def test_a_long_run_leaves_nothing_behind_in_the_store(tmp_path, pool):
    assert max(pool.run(many_saves, tmp_path, 10).results) <= 2


def test_after_going_back_the_next_save_removes_what_came_after(tmp_path, caplog):
    with bcp.Checkpointer(tmp_path) as ckpt:
        for step in (98, 99, 100):
            ckpt.save(step, state(step))
    with bcp.Checkpointer(tmp_path, overwrite=True) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.load(98, state())
        assert "went back to step 98" in caplog.text
        for step in (99, 101):
            ckpt.save(step, state(-step))
            ckpt.close()
            assert folders(tmp_path) == [98, *range(99, step + 1, 2)]
        assert ckpt.load_latest(state()) == 101


def find_images():
    """References to all copies of states that are in memory."""
    return {weakref.ref(one) for one in gc.get_objects() if type(one) is Image}


def cut_manifest(folder):
    os.truncate(folder / "manifest.json", 3)


def cut_values(folder):
    (file,) = folder.glob("data-*/rank-*.safetensors")
    os.truncate(file, 100)


def lose_values(folder):
    shutil.rmtree(next(folder.glob("data-*")))


@pytest.mark.parametrize("damage", [cut_manifest, cut_values, lose_values])
def test_a_damaged_newest_step_is_passed_over_and_set_aside(tmp_path, caplog, damage):
    with bcp.Checkpointer(tmp_path) as ckpt:
        for step in (10, 20):
            ckpt.save(step, state(step))
    damage(tmp_path / "step_00000020")
    left = sorted(one.name for one in (tmp_path / "step_00000020").rglob("*"))
    with bcp.Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING):
        assert ckpt.load_latest(state()) == 10
        assert "step 20 is damaged" in caplog.text
        # Loading changes nothing: another job may only be looking.
        assert folders(tmp_path) == [10, 20]
        ckpt.save(20, state(-20)).committed.result(60)
        into = state()
        assert ckpt.load_latest(into) == 20
        assert into["n"] == -20
    (aside,) = tmp_path.glob("step_00000020.damaged*")
    assert sorted(one.name for one in aside.rglob("*")) == left
    assert aside.name in caplog.text
    assert ckpt.steps() == [10, 20]


def test_a_damaged_step_is_set_aside_in_an_object_store(caplog):
    url = f"memory://{secrets.token_hex(6)}"
    with bcp.Checkpointer(url) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    storage = open_storage(url)
    storage.publish("step_00000002/manifest.json", b"{", overwrite=True)
    with bcp.Checkpointer(url) as ckpt, caplog.at_level(logging.WARNING):
        assert ckpt.load_latest(state()) == 1
        ckpt.save(2, state(-2))
    assert ckpt.steps() == [1, 2]
    assert sum("damaged" in name for name in storage.list("")) == 1


def test_a_closed_checkpointer_holds_no_copy(tmp_path):
    others = find_images()
    ckpt = bcp.Checkpointer(tmp_path)
    ckpt.save(1, state())
    images = find_images() - others
    assert len(images) == 1
    ckpt.close()
    gc.collect()
    assert not [one for one in images if one() is not None]
    ckpt.save(2, state(2))
    ckpt.close()
    assert ckpt.steps() == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_start_fails_the_save_and_hangs_nothing(tmp_path, monkeypatch):
    ckpt = bcp.Checkpointer(tmp_path, on_error="warn")
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "bytecheckpoint-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        handle = ckpt.save(1, state())
    with pytest.raises(RankFailure, match="can't start new thread"):
        handle.committed.result(60)
    assert handle.staged.is_set()
    ckpt.save(2, state(2)).committed.result(60)
    assert ckpt.steps() == [2]
