"""What a checkpoint holds: what torch's optimizer has, and no more; and one that cannot be written."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swift
from shared.comms.init import alone
from shared.errors import CommError, ConfigError, DiskFullError


class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.used = torch.nn.Linear(4, 3)
        self.later = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)


def make(group, seed=0):
    """A trainable, and its step; `later` has a gradient from step 2 on."""
    model = Net(seed)
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    dp = swift.DataParallel(model, swift.undoable(torch.optim.AdamW(model.parameters(), 0.05)), run)
    dp.regroup(group)

    def step(at):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(at))
        hidden = model.used(x) + (model.later(x) if at >= 2 else 0)
        dp.begin(at)
        dp.backward(model.norm(hidden).square().mean() + hidden.square().mean())
        dp.finish(at)

    return dp, step


def values(dp):
    return [
        (name, one.clone())
        for at in range(len(dp.versions()))
        for name, one in dp.state_of(at).items()
    ]


@pytest.mark.parametrize("saved_at", [1, 3])
def test_it_holds_the_state_that_torch_has_and_training_goes_on_from_it(tmp_path, saved_at):
    every = swift.Every(1, tmp_path)
    with alone() as group:
        dp, step = make(group)
        for at in range(saved_at):
            step(at)
        every.save(group, dp, saved_at)
        before = values(dp)
        for at in range(saved_at, 5):
            step(at)
        keys = (
            dcp.FileSystemReader(tmp_path / f"step-{saved_at}").read_metadata().state_dict_metadata
        )
        with_state = {name.split("/")[0] for name in keys if name.endswith("/exp_avg")}
        layers = ("used", "later") if saved_at == 3 else ("used",)
        assert with_state == {
            f"{at}.{name}" for at in (*layers, "norm") for name in ("weight", "bias")
        }

        other, other_step = make(group, seed=1)
        for at in range(4):
            other_step(at)
        every.load(group, other, saved_at)
        assert [name for name, _ in values(other)] == [name for name, _ in before]
        for at in range(saved_at, 5):
            other_step(at)
        for (name, one), (_, expected) in zip(values(other), values(dp), strict=True):
            assert torch.equal(one, expected), name


def test_one_that_is_damaged_is_named(tmp_path):
    every = swift.Every(1, tmp_path)
    with alone() as group:
        dp, step = make(group)
        step(0)
        every.save(group, dp, 1)
        (tmp_path / "step-1" / ".metadata").write_bytes(b"")
        with pytest.raises(CommError, match=r"reading .*step-1 failed: "):
            every.load(group, dp, 1)


def test_old_ones_and_what_was_cut_off_go_when_another_is_committed(tmp_path):
    every = swift.Every(1, tmp_path, keep=2)
    (tmp_path / "step-old").mkdir()  # the user's
    with alone() as group:
        dp, step = make(group)
        for at in range(4):
            step(at)
            every.save(group, dp, at + 1)
            if at == 2:
                (tmp_path / "step-2" / "COMMITTED").unlink()
                (tmp_path / "step-7").mkdir()  # one that is being written
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-3", "step-4", "step-7", "step-old",
    ]  # fmt: skip
    assert every.latest() == 4


def test_a_url_is_refused():
    with pytest.raises(ConfigError, match=r"folder: expected .*, got s3://bucket/run; mount it"):
        swift.Every(10, "s3://bucket/run")


class BreaksOff(dcp.FileSystemReader):
    """Fills what it is asked for, and then finds the checkpoint damaged."""

    def read_data(self, plan, planner):
        super().read_data(plan, planner)
        raise OSError("bad block")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_stays_as_it_was_where_reading_breaks_off(tmp_path, steps):
    with alone() as group:
        dp, step = make(group)
        for at in range(4):
            step(at)
        swift.Every(1, tmp_path).save(group, dp, 4)
        other, other_step = make(group, seed=1)
        for at in range(steps):
            other_step(at)
        before = values(other)
        with pytest.raises(CommError, match="bad block"):
            swift.Every(1, tmp_path, reader=BreaksOff).load(group, other, 4)
        after = values(other)
        assert other.versions() == [steps] * len(other.versions())
    assert [name for name, _ in after] == [name for name, _ in before]
    for (name, one), (_, expected) in zip(after, before, strict=True):
        assert torch.equal(one, expected), name


class OneTensor:
    """A trainable on one rank: a tensor, and the rest of a state."""

    def versions(self):
        return [1, 1]

    def state_of(self, entry):
        if entry == 0:
            return {"weight": torch.zeros(50_000)}
        return {"rest": torch.zeros(4, dtype=torch.uint8)}

    def replica_sets(self, world_size):
        return [[0]]


@pytest.mark.unchecked  # the tensor is no trainable of ours
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path, small_disk):
    folder = small_disk(300_000)
    every = swift.Every(1, folder)
    with alone() as group:
        every.save(group, OneTensor(), 1)
        with pytest.raises(DiskFullError) as caught:
            every.save(group, OneTensor(), 2)
    start = f"{folder}/step-2: expected room on the disk for what is written there, got "
    assert str(caught.value).startswith(start)
    assert str(caught.value).count("\n") == 0
    assert every.latest() == 1
    assert os.path.exists(folder / "step-1" / "COMMITTED")
