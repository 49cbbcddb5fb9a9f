"""Lost stages come back bit for bit: alone, with helpers, several as one; and what differs is named."""

import copy
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from small_stages import MICRO_BATCHES, batch, make_stage, state_of, train

from shared.comms import Group, RankPool
from shared.errors import DataError
from swift.pipeline.chunks import scan_chunk
from swift.pipeline.holes import find_holes
from swift.pipeline.records import Key, Kind
from swift.pipeline.replay import agree, make_groups, replay, serve
from swift.pipeline.stage import PipelineStage

START, TARGET = 2, 5
"""Iterations of the checkpoint and of the loss."""


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout=timedelta(seconds=40)) as ranks:
        yield ranks


def same(one, two):
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def checkpoint_of(stage):
    return {
        "iteration": stage.iteration,
        "module": {k: v.clone() for k, v in stage.module.state_dict().items()},
        "opt": copy.deepcopy(stage.opt.optimizer.state_dict()),
    }


def load(stage, checkpoint):
    stage.module.load_state_dict(checkpoint["module"])
    stage.opt.optimizer.load_state_dict(copy.deepcopy(checkpoint["opt"]))
    for at in range(len(stage.opt.parameters)):
        stage.opt.mark(at, checkpoint["iteration"])
    stage.iteration = checkpoint["iteration"]


def share(group, mine):
    """Every rank's checkpoint, as a folder that all read would give it."""
    everyone = [None] * group.world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def lose_and_replay(folder, lost, chunk=2, logged=None, num_helpers=0, tamper=None, module=None):
    """Trains, forgets stages, replays; whether the state, the log and the next steps are the same."""
    group = Group.world()
    settings = {"chunk": chunk, "logged": logged, "extra": module}
    stage = make_stage(folder, group, **settings)
    train(stage, START)
    checkpoints = share(group, checkpoint_of(stage))
    stage.writer.start_interval(START)
    train(stage, TARGET)
    before, log_before = state_of(stage), logged_digests(stage)
    served = replayed = None
    holes = find_holes(group.world_size, lost, logged, num_helpers)
    groups = make_groups(group, holes)
    if tamper is not None:
        tamper(stage, checkpoints)
    for hole, of in zip(holes, groups, strict=True):
        if group.rank in hole.stages:
            stage = make_stage(folder, group, **settings)
            load(stage, checkpoints[group.rank])
            replayed = run(stage, hole, of)
        elif group.rank in hole.helpers:
            other = make_stage(folder, group, index=hole.first, log=False, **settings)
            load(other, checkpoints[hole.first])
            replayed = run(other, hole, of)
        else:
            served = served or serve(
                stage.writer, group.rank, hole, of, group.world_size, chunk, MICRO_BATCHES,
                range(START, TARGET),
            )  # fmt: skip
    if (missing := agree(group, served, replayed)) is not None:
        return missing
    equal = same(before, state_of(stage)), log_before == logged_digests(stage)
    train(stage, TARGET + 2)
    return *equal, state_of(stage)


def run(stage, hole, groups):
    def repeat(iteration):
        assert iteration == stage.iteration
        stage.step(*batch(iteration))

    return replay(stage, hole, groups, TARGET, repeat)


def logged_digests(stage):
    return [
        stage.writer.digest_of(Key(kind, iteration, k))
        for kind in Kind
        for iteration in range(START, TARGET)
        for k in range(MICRO_BATCHES)
    ]


def undisturbed(folder, chunk):
    stage = make_stage(folder, Group.world(), chunk=chunk)
    train(stage, TARGET + 2)
    return state_of(stage)


@pytest.mark.parametrize(
    ("lost", "chunk", "logged", "num_helpers"),
    [
        pytest.param({0}, 2, None, 0, marks=pytest.mark.slow),
        pytest.param({1}, 2, None, 0, marks=pytest.mark.slow),
        pytest.param({3}, 6, None, 0, marks=pytest.mark.slow),
        ({0, 2}, 2, None, 0),
        pytest.param({1, 2}, 4, None, 0, marks=pytest.mark.slow),
        pytest.param({0, 1, 2, 3}, 2, None, 0, marks=pytest.mark.slow),
        ({2}, 2, [True, False, True], 0),
        pytest.param({0}, 2, None, 1, marks=pytest.mark.slow),
        pytest.param({1}, 2, None, 1, marks=pytest.mark.slow),
        ({3}, 1, None, 2),
        pytest.param({3}, 4, None, 2, marks=pytest.mark.slow),
    ],
)
def test_lost_stages_come_back_bit_for_bit(pool, tmp_path, lost, chunk, logged, num_helpers):
    wanted = pool.run(undisturbed, tmp_path / "a", chunk).results
    found = pool.run(lose_and_replay, tmp_path / "b", lost, chunk, logged, num_helpers).results
    with_helpers = bool(num_helpers)
    for rank, (is_same, has_same_log, later) in enumerate(found):
        assert is_same, f"stage {rank} after its replay"
        # With helpers a rank logs its own chunks alone.
        assert has_same_log or (with_helpers and rank in lost), f"stage {rank}"
        assert same(later, wanted[rank]), f"stage {rank} two steps later"


def changed_checkpoint(stage, checkpoints):
    """One value of stage 1's checkpoint is off by one bit, which no rounding hides."""
    checkpoints[1]["module"]["0.weight"].view(torch.int32)[0, 0] ^= 1 << 15


def changed_late(stage, checkpoints):
    """Stage 1's random numbers are others from the middle of the replay on."""
    step = PipelineStage.step

    def step_with_another_seed(self, inputs, targets):
        self.seed += self.index == 1 and self.iteration == TARGET - 2
        return step(self, inputs, targets)

    setattr(PipelineStage, "step", step_with_another_seed)  # noqa: B010


def changed_log(stage, checkpoints):
    """A bit flips in what stage 2 logged: the last message of the last iteration."""
    stage.writer.flush()
    if stage.index == 2:
        path = max(stage.writer.folder.glob("*.log"))
        data = bytearray(path.read_bytes())
        record = scan_chunk(path).records[Key(Kind.GRADIENT, TARGET - 1, MICRO_BATCHES - 1)]
        data[record.offset] ^= 1
        path.write_bytes(data)


def missing_log(stage, checkpoints):
    """The file of what stage 0 logged is gone."""
    stage.writer.flush()
    if stage.index == 0:
        max(stage.writer.folder.glob("*.log")).unlink()


def caught(folder, lost, tamper, num_helpers, module=None):
    step = PipelineStage.step
    try:
        found = lose_and_replay(folder, lost, num_helpers=num_helpers, tamper=tamper, module=module)
    except DataError as error:
        return str(error)
    finally:
        PipelineStage.step = step
    return found if isinstance(found, str) else None


@pytest.mark.parametrize(
    ("lost", "tamper", "num_helpers", "text"),
    [
        (
            {1}, changed_checkpoint, 0,
            r"the replay of stage 1 differs from training in iteration 2: .* activation of micro-batch 0",
        ),
        ({1}, changed_checkpoint, 1, r"stage 1 differs .* iteration 2: .* activation of micro-batch 0"),
        ({1, 2}, changed_checkpoint, 0, r"stage 1 differs .* in iteration 2: .* gradient of micro-batch 0"),
        ({1}, changed_late, 0, r"stage 1 differs from training in iteration 3: .* activation of micro-"),
        ({1}, changed_log, 0, r"^gradient of iteration 4, micro-batch 5: expected the 48 bytes of digest"),
        ({1}, missing_log, 0, r"000001.log, which holds the activation of iteration 2, .* is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_all_ranks_hear_what_differs(pool, tmp_path, lost, tamper, num_helpers, text):
    found = pool.run(caught, tmp_path, lost, tamper, num_helpers).results
    assert len(set(found)) == 1
    assert found[0] is not None
    assert re.search(text, found[0]), found[0]


def test_a_stage_that_changes_buffers_replays_alone_only(pool, tmp_path):
    assert pool.run(caught, tmp_path / "a", {3}, None, 0, "norm").results == [None] * 4
    found = pool.run(caught, tmp_path / "b", {3}, None, 1, "norm").results
    assert all("stage 3 changes buffers in its forward pass" in text for text in found)
