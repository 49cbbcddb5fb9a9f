"""What a checkpoint holds: what torch's optimizer has, and no more; and one that cannot be written."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swift
from shared.comms import Group
from shared.comms.init import alone
from shared.errors import CommError, ConfigError, DataError, DiskFullError


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
    run = SimpleNamespace(rank=group.rank, world_size=group.world_size, reads_whole_batches=False)
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
                assert [every.is_due(step) for step in (0, 2, 3)] == [False, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-3", "step-4", "step-7", "step-old",
    ]  # fmt: skip
    assert every.latest() == 4


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nowhere://bucket/run", "got nowhere://bucket/run: Protocol not known: nowhere"),
        ("memory://run", "got memory://run, which is each process's own; give a path or"),
    ],
)
def test_urls_that_are_no_place_for_all_ranks_are_refused(url, text):
    with pytest.raises(ConfigError, match=text):
        swift.Every(10, url)


def save_and_resume(url):
    """What two ranks find at a URL, and the state of a third training that is filled from it."""
    every, group = swift.Every(1, url, keep=2), Group.world()
    found = [every.latest()]
    dp, step = make(group)
    for at in range(3):
        step(at)
        every.save(group, dp, at + 1)
    other, _ = make(group, seed=1)
    found += [every.latest(), every.is_due(3), every.is_due(4)]
    every.load(group, other, 3)
    return found, all(
        name == expected and torch.equal(one, value)
        for (name, one), (expected, value) in zip(values(other), values(dp), strict=True)
    )


def test_a_url_serves_as_a_folder(two_ranks, tmp_path):
    url = f"file://{tmp_path}/run"
    assert two_ranks.run(save_and_resume, url).results == [([0, 3, False, True], True)] * 2
    (tmp_path / "run" / "step-9").mkdir()  # cut off before its mark
    assert swift.Every(1, url).latest() == 3
    # The same checkpoints at a path.
    assert swift.Every(1, tmp_path / "run").latest() == 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "step-2",
        "step-3",
        "step-9",
    ]


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


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    every = swift.Every(1, tmp_path)
    with alone() as group:
        dp, step = make(group)
        step(0)
        every.save(group, dp, 1)
        model = Net(0)
        model.added = torch.nn.Linear(4, 3)
        run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
        optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), 0.05))
        other = swift.DataParallel(model, optimizer, run)
        other.regroup(group)
        before = values(other)
        told = "expected all 8 parameters of the model, got a checkpoint without added.weight/param, added.bias/param; train"
        with pytest.raises(DataError, match=told):
            every.load(group, other, 1)
    assert [name for name, _ in values(other)] == [name for name, _ in before]
    assert all(
        torch.equal(one, was) for (_, one), (_, was) in zip(values(other), before, strict=True)
    )
