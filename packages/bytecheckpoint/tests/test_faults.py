"""What goes wrong around a save: told to all ranks, harmless to training and to what is committed.

All faults share the few ways of making storage and processes fail, so their lines stay together.
"""

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from bytecheckpoint.storage.local import LocalStorage
from shared.comms import RankPool
from shared.errors import CommError, ConfigError, RankFailure

from .faulty_storage import before, deadly, failing, held, slow

STAGES = ["arena", "fork"]

LIMIT = timedelta(seconds=60)


def state(number, numel=1000):
    return {"x": torch.full((numel,), float(number)), "n": number}


def loaded(path, step, numel=1000):
    into = state(-1, numel)
    bcp.load(path / commit.format_step(step), into)
    assert bool((into["x"] == into["n"]).all()), "parts of several saves"
    return into["n"]


# --- A storage that refuses, on one rank of two. ---

FAULTS = [
    ("create", errno.EACCES, 1, "arena", PermissionError),
    ("create", errno.EACCES, 1, "fork", PermissionError),
    ("write", errno.ENOSPC, 1, "arena", OSError),
    ("write", errno.ENOSPC, 0, "fork", OSError),
    ("sync", errno.EIO, 1, "arena", OSError),
    ("sync folders", errno.EIO, 0, "arena", OSError),
    ("publish", errno.ENOSPC, 0, "arena", OSError),
    ("publish", errno.EDQUOT, 0, "fork", OSError),
]


def save_on_bad_storage(path, call, number, bad_rank, stage):
    """A save before, one that fails, training, one after; what the failed one's handle says."""
    rank = dist.get_rank()
    part = bcp.FlatShard(torch.full((500,), 1.0), (1000,), 500 * rank)
    with bcp.Checkpointer(path, stage=stage, timeout=LIMIT, on_error="warn") as ckpt:
        ckpt.save(1, {"x": part, "n": 1}).committed.result(60)
        part.tensor.fill_(2.0)
        with failing(call, number) if rank == bad_rank else nullcontext():
            handle = ckpt.save(2, {"x": part, "n": 2})
            assert handle.staged.wait(60)
            part.tensor.fill_(3.0)  # training goes on
            error = handle.committed.exception(60)
        dist.barrier()
        left = commit.list_steps(LocalStorage(path))
        ckpt.save(3, {"x": part, "n": 3}).committed.result(60)
    return type(error), getattr(error, "errno", None), str(error), left


@pytest.mark.parametrize("stage", STAGES)
def test_a_storage_that_refuses_on_one_rank_is_told_to_all(tmp_path, stage, pool):
    for at, (call, number, bad, of_stage, kind) in enumerate(FAULTS):
        if of_stage != stage:
            continue
        path = tmp_path / str(at)
        one, two = pool.run(save_on_bad_storage, path, call, number, bad, stage).results
        assert one == two
        assert issubclass(one[0], kind)
        assert one[1] == number
        assert f"rank {bad} of 2" in one[2]
        assert f"/the/file/at/{call}" in one[2]
        assert one[3] == [1]
        with bcp.Checkpointer(path) as ckpt:
            assert ckpt.steps() == [1, 3]
        assert (loaded(path, 1), loaded(path, 3)) == (1, 3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_size_limit_of_the_system_fails_the_save_alone(tmp_path, stage):
    """The operating system's own refusal, in the midst of a file."""
    numel = 1 << 20
    with bcp.Checkpointer(tmp_path, stage=stage, on_error="warn") as ckpt:
        ckpt.save(1, state(1, numel)).committed.result(60)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            error = ckpt.save(2, state(2, numel)).committed.exception(60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(error, OSError)
        assert error.errno == errno.EFBIG
        assert "rank-00000.safetensors" in str(error)
        # A file that was given up takes no space.
        assert not list((tmp_path / "step_00000002").glob("*/*.safetensors"))
        assert ckpt.steps() == [1]
        ckpt.save(3, state(3, numel)).committed.result(60)
    assert loaded(tmp_path, 3, numel) == 3


def test_a_failed_save_is_logged_and_raised_at_the_end(tmp_path, caplog):
    ckpt = bcp.Checkpointer(tmp_path)
    with failing("write", errno.ENOSPC):
        handle = ckpt.save(1, state(1))
        handle.committed.exception(60)
    assert "step_00000001 was not saved" in caplog.text
    assert "/the/file/at/write: expected room on the disk" in caplog.text
    with pytest.raises(OSError, match="expected room on the disk") as raised:
        ckpt.close()
    assert raised.value.errno == errno.ENOSPC


def save_after_a_failure(path):
    """What the save after a failed one raises."""
    ckpt = bcp.Checkpointer(path, timeout=LIMIT)
    own = {f"own{dist.get_rank()}": torch.ones(10)}
    with failing("write", errno.ENOSPC) if dist.get_rank() == 1 else nullcontext():
        ckpt.save(1, own).committed.exception(60)
    try:
        ckpt.save(2, own)
    except OSError as error:
        return str(error)
    return "nothing"


def test_the_next_save_names_the_rank_that_failed_once(tmp_path, pool):
    for text in pool.run(save_after_a_failure, tmp_path).results:
        assert "step 1 was not saved" in text
        assert text.count("rank 1 of 2") == 1
        assert "rank 0 of 2" not in text


def test_an_error_says_once_what_the_system_says(tmp_path):
    with failing("write", errno.EIO), pytest.raises(OSError, match="Input/output") as raised:
        bcp.save(tmp_path / "x", state(1))
    assert str(raised.value).count("Errno") == 1


@pytest.mark.parametrize("call", ["create", "write", "sync", "sync folders", "publish"])
def test_a_replacement_that_fails_leaves_the_old_one(tmp_path, call):
    path = tmp_path / "one"
    bcp.save(path, state(1))
    with failing(call, errno.EIO), pytest.raises(OSError, match="/the/file/at/"):
        bcp.save(path, state(2), overwrite=True)
    into = state(0)
    bcp.load(path, into)
    assert into["n"] == 1
    bcp.save(path, state(3), overwrite=True)
    bcp.load(path, into)
    assert into["n"] == 3
    storage = LocalStorage(path)
    commit.remove_garbage(storage, commit.find_garbage(storage))
    assert sorted(storage.list("")) == sorted(
        [MANIFEST_NAME, commit.read_manifest(storage, "").data]
    )


def test_a_child_that_cannot_be_forked_fails_the_save_alone(tmp_path, monkeypatch):
    with bcp.Checkpointer(tmp_path, stage="fork", on_error="warn") as ckpt:
        ckpt.save(1, state(1)).committed.result(60)

        def refuse():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        with monkeypatch.context() as broken:
            broken.setattr(os, "fork", refuse)
            handle = ckpt.save(2, state(2))
            error = handle.committed.exception(60)
        assert isinstance(error, BlockingIOError)
        ckpt.save(3, state(3)).committed.result(60)
        assert ckpt.steps() == [1, 3]


def test_a_child_that_is_killed_fails_the_save_alone(tmp_path):
    with bcp.Checkpointer(tmp_path, stage="fork", on_error="warn") as ckpt:
        ckpt.save(1, state(1)).committed.result(60)
        with deadly("sync"):
            error = ckpt.save(2, state(2)).committed.exception(60)
        assert isinstance(error, CommError)
        assert "child process" in str(error)
        ckpt.save(3, state(3)).committed.result(60)
        assert ckpt.steps() == [1, 3]


# --- Ranks that die or hang. ---


def save_while_another_dies(path, dying, call, hangs):
    """Rank `dying` is lost in the midst of a save; the other writes down what it was told."""
    rank = dist.get_rank()
    ckpt = bcp.Checkpointer(path, timeout=timedelta(seconds=0.6) if hangs else LIMIT)
    ckpt.save(1, state(1)).committed.result(60)
    # Of two ranks both must have something to write.
    own = {"own": torch.full((100,), float(rank)), "n": 2}
    begin = time.monotonic()
    bad = nullcontext() if rank != dying else slow(2.0, call) if hangs else deadly(call)
    with bad:
        handle = ckpt.save(2, {f"r{rank}": own})
        error = handle.committed.exception(60)
    waited_s = time.monotonic() - begin
    text = f"{type(error).__name__}\n{waited_s}\n{error}"
    (path / f"told-{rank}").write_text(text)


@pytest.mark.parametrize(
    ("dying", "call"), [(1, "write"), pytest.param(0, "publish", marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_before_the_commit_is_named_in_time(tmp_path, dying, call):
    with (
        pytest.raises(RankFailure, match=f"rank {dying} of 2"),
        RankPool(2, timeout=timedelta(seconds=100)) as pool,
    ):
        pool.run(save_while_another_dies, tmp_path, dying, call, False)
    kind, waited_s, text = (tmp_path / f"told-{1 - dying}").read_text().split("\n", 2)
    assert kind == "CommError"
    assert f"rank {dying}" in text
    assert float(waited_s) < 40, "the timeout is 60 s"
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1]
    assert loaded(tmp_path, 1) == 1


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_in_time_and_may_finish_later(tmp_path, pool):
    pool.run(save_while_another_dies, tmp_path, 1, "sync", True)
    for rank in (0, 1):
        kind, waited_s, text = (tmp_path / f"told-{rank}").read_text().split("\n", 2)
        assert kind == "CommError"
        assert "rank 1 of 2 did not report within" in text
        assert (float(waited_s) < 1.9) == (rank == 0)
    assert loaded(tmp_path, 1) == 1
    assert commit.list_steps(LocalStorage(tmp_path)) == [1]


# --- Training beside a save. ---


def test_a_fork_freezes_memory_that_processes_share(tmp_path, monkeypatch):
    fork = os.fork

    def fork_and_lag():
        pid = fork()
        if pid == 0:
            time.sleep(0.3)
        return pid

    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(1000,))
    shared = torch.zeros(3000).share_memory_()
    values = {
        "mapped": torch.from_numpy(mapped),
        "array": mapped[10:20],
        "shared": shared[5:],
        "strided": shared[::3],
        "own": torch.zeros(1000),
        "none": torch.zeros(0),
    }
    with bcp.Checkpointer(tmp_path / "run", stage="fork") as ckpt:
        with monkeypatch.context() as lagging:
            lagging.setattr(os, "fork", fork_and_lag)
            handle = ckpt.save(1, values)
        for value in (mapped, shared, values["own"]):
            value += 1
        handle.committed.result(60)
    with bcp.open(tmp_path / "run" / commit.format_step(1)) as saved:
        for name in values:
            assert not saved.read(name).any(), name


def collectives_beside(path, stage):
    rank, size = dist.get_rank(), dist.get_world_size()
    go = path.with_name(f"go-{rank}")
    with bcp.Checkpointer(path, stage=stage) as ckpt, held(go):
        handle = ckpt.save(1, state(rank + 1))
        count = 0
        while True:
            if count == 6:
                assert not handle.committed.done()
                go.touch()
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            assert total.item() == size * (size + 1) / 2
            gathered = [torch.zeros(3) for _ in range(size)]
            dist.all_gather(gathered, torch.full((3,), float(rank)))
            assert [int(t[0]) for t in gathered] == list(range(size))
            count += 1
            stop = torch.tensor([handle.committed.done()], dtype=torch.int32)
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop.item():
                break
        handle.committed.result(60)
    return count


@pytest.mark.parametrize("stage", ["arena", pytest.param("fork", marks=pytest.mark.slow)])
def test_collectives_of_training_go_on_during_a_save(tmp_path, stage, pool):
    counts = pool.run(collectives_beside, tmp_path / "run", stage).results
    assert min(counts) > 5
    assert commit.list_steps(LocalStorage(tmp_path / "run")) == [1]


@pytest.mark.parametrize("stage", STAGES)
def test_values_changed_in_place_after_save_are_stored_as_they_were(tmp_path, stage):
    numel = 1 << 20
    one, two = state(1, numel), torch.full((5, 7), 1.0, dtype=torch.bfloat16).t()
    whole = {**one, "two": two, "list": [1]}
    with bcp.Checkpointer(tmp_path, stage=stage) as ckpt:
        for step in (1, 2, 3):
            go = tmp_path / f"go-{step}"
            with held(go):
                handle = ckpt.save(step, whole)
                assert not handle.committed.done()
                one["x"].add_(1)
                two.add_(1)
                whole["n"] += 1
                whole["list"][0] += 1
                go.touch()
                handle.committed.result(60)
    for step in (1, 2, 3):
        into = {**state(0, numel), "two": torch.zeros(7, 5, dtype=torch.bfloat16), "list": [0]}
        bcp.load(tmp_path / commit.format_step(step), into)
        assert (into["n"], into["list"]) == (step, [step])
        assert bool((into["x"] == step).all())
        assert bool((into["two"] == step).all())


@pytest.mark.parametrize("when_busy", ["wait", "drop", "fail"])
def test_a_save_while_another_is_under_way(tmp_path, when_busy):
    with bcp.Checkpointer(tmp_path, when_busy=when_busy) as ckpt:
        go = tmp_path / "go"
        with held(go):
            first = ckpt.save(1, state(1))
            assert not first.committed.done()
            if when_busy == "wait":
                threading.Timer(0.2, go.touch).start()
            if when_busy == "fail":
                with pytest.raises(ConfigError, match="the save of step 1 is still under way"):
                    ckpt.save(2, state(2))
            else:
                second = ckpt.save(2, state(2))
                assert second.is_skipped == (when_busy == "drop")
            assert first.committed.done() == (when_busy == "wait")
            go.touch()
        first.committed.result(60)
        ckpt.save(3, state(3)).committed.result(60)
        assert ckpt.steps() == ([1, 2, 3] if when_busy == "wait" else [1, 3])


def busy_on_one_rank(path, when_busy):
    rank = dist.get_rank()
    ckpt = bcp.Checkpointer(path, when_busy=when_busy)
    # The part of rank 1 alone is slow; rank 0 still has to wait for the commit.
    go = path.with_name(f"go-{when_busy}")
    with held(go) if rank == 1 else nullcontext():
        first = ckpt.save(1, {f"own{rank}": torch.ones(10)})
        try:
            answer = ckpt.save(2, {f"own{rank}": torch.ones(10)}).is_skipped
        except ConfigError as error:
            answer = str(error)
        dist.barrier()
        go.touch()
        first.committed.result(60)
    ckpt.close()
    return answer


def test_ranks_agree_whether_a_save_is_under_way(tmp_path, pool):
    assert pool.run(busy_on_one_rank, tmp_path / "drop", "drop").results == [True, True]
    one, two = pool.run(busy_on_one_rank, tmp_path / "fail", "fail").results
    assert one == two
    assert "still under way" in one


# --- Processes that fork or end during a save. ---


@pytest.mark.parametrize("stage", ["arena", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_process_forked_during_a_save_does_no_harm(tmp_path, stage):
    go = tmp_path / "go"
    with bcp.Checkpointer(tmp_path, stage=stage) as ckpt, held(go):
        handle = ckpt.save(1, state(1))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The child's own view: nothing is under way, and leaving waits for nothing.
                ckpt.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert not handle.committed.done()
        go.touch()
        handle.committed.result(60)
    assert loaded(tmp_path, 1) == 1


def square(number):
    return number * number


@pytest.mark.slow
def test_multiprocessing_and_data_loaders_during_a_save(tmp_path):
    with bcp.Checkpointer(tmp_path, stage="fork") as ckpt, slow(1.0):
        handle = ckpt.save(1, state(1))
        loader = DataLoader(
            torch.arange(20), batch_size=5, num_workers=2, multiprocessing_context="fork"
        )
        assert torch.cat(list(loader)).tolist() == list(range(20))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
        handle.committed.result(60)
    assert loaded(tmp_path, 1) == 1


SCRIPT = """
    import os, sys, time
    import torch
    import bytecheckpoint as bcp
    from bytecheckpoint.storage.local import LocalSink

    write_at, go = LocalSink.write_at, os.path.join(sys.argv[1], "go")

    def slowly(self, offset, data):
        while not os.path.exists(go):
            time.sleep(0.002)
        time.sleep(0.4)
        write_at(self, offset, data)

    LocalSink.write_at = slowly
    ckpt = bcp.Checkpointer(sys.argv[1], stage=sys.argv[2])
    handle = ckpt.save(1, {"x": torch.full((1000,), 5.0), "n": 5})
    assert not handle.committed.done()
    open(go, "w").close()
"""
ENDS = {
    "the end": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise KeyboardInterrupt",
    "a forked child": "pid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nelse:\n    sys.exit(0)",
}


@pytest.mark.parametrize(
    ("stage", "end"),
    [
        pytest.param("fork", "the end", marks=pytest.mark.slow),
        ("arena", "a forked child"),
        pytest.param("arena", "sys.exit", marks=pytest.mark.slow),
        pytest.param("arena", "an exception", marks=pytest.mark.slow),
    ],
)
def test_a_save_that_is_pending_at_exit_is_finished(tmp_path, stage, end):
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(ENDS[end])
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, stage],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode == 0) == (end != "an exception"), done.stderr
    assert "not saved" not in done.stderr
    assert loaded(tmp_path, 1) == 5


def save_and_return(path):
    """Leaves a save behind; the pool ends the rank."""
    kept.append(held(path.with_name("go")))
    kept[-1].__enter__()
    kept.append(bcp.Checkpointer(path))
    return kept[-1].save(1, {f"own{dist.get_rank()}": torch.ones(3), "n": 1}).committed.done()


kept = []


def test_a_save_that_is_pending_when_ranks_end_is_finished(tmp_path):
    with RankPool(2, timeout=timedelta(seconds=100)) as pool:
        assert pool.run(save_and_return, tmp_path / "run").results == [False, False]
        threading.Timer(0.2, (tmp_path / "go").touch).start()
    assert commit.list_steps(LocalStorage(tmp_path / "run")) == [1]


# --- Two jobs. ---


def test_of_two_jobs_that_save_one_step_one_succeeds(tmp_path):
    """Both have written everything before either publishes."""
    met = threading.Barrier(2, timeout=60)
    one, two = bcp.Checkpointer(tmp_path), bcp.Checkpointer(tmp_path)
    with before("publish", lambda *_: met.wait()):
        handles = [one.save(1, state(1)), two.save(1, state(2))]
        errors = [handle.committed.exception(60) for handle in handles]
    assert sorted(type(error).__name__ for error in errors) == ["FileExistsError", "NoneType"]
    winner = errors.index(None)
    assert loaded(tmp_path, 1) == winner + 1
    storage = LocalStorage(tmp_path)
    commit.remove_garbage(storage, commit.find_garbage(storage))
    assert loaded(tmp_path, 1) == winner + 1


def test_of_two_jobs_that_replace_one_step_the_last_one_stays_whole(tmp_path):
    bcp.save(tmp_path / commit.format_step(1), state(0))
    met = threading.Barrier(2, timeout=60)
    jobs = [bcp.Checkpointer(tmp_path, overwrite=True) for _ in range(2)]
    with before("publish", lambda *_: met.wait()):
        handles = [job.save(1, state(at + 1)) for at, job in enumerate(jobs)]
        errors = [handle.committed.exception(60) for handle in handles]
    assert errors == [None, None]
    assert loaded(tmp_path, 1) in (1, 2)
