"""Moves between training's layout and generation's that are broken off: nothing mixed is used."""

import itertools
import time

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

import hybridflow as hy
from hybridflow import Batch, WorkerGroup
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.pieces import initialize
from hybridflow.reshard.planner import find_held_boxes, find_wanted_boxes
from hybridflow.reshard.transition import Transition, buckets
from hybridflow.roles.actor import ActorWorker, PolicyUpdate
from hybridflow.workers.batch.layout import Layout, generation_groups
from hybridflow.workers.pool import ResourcePool
from shared.comms.group import Group
from shared.errors import CommError, DataError, RankFailure

MODEL = "config:tiny-llama"


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("exception", [MemoryError, KeyboardInterrupt])
def test_weights_of_a_move_that_was_broken_off_are_refused(way, bucket, exception):
    config = read_config(MODEL)
    shard = Shard(config, 0, 1, 0, 1)
    model, generator = Decoder(config, shard), Decoder(config, shard, device="meta")
    initialize(model, 3)
    boxes = [find_held_boxes(config, Layout(), 0)]
    moved = Transition(model, generator, boxes, boxes, None, bucket_bytes=1)
    assert len(moved.buckets) > 3
    if way == "back":
        moved.to_generation()
    side = moved.generation if way == "there" else moved.training
    allocate, calls = side.allocate, itertools.count()

    def breaking(names):
        if next(calls) == bucket:
            raise exception("no room")
        allocate(names)

    side.allocate = breaking
    with pytest.raises(exception, match="no room"):
        moved.to_generation() if way == "there" else moved.to_training()
    for move in (moved.to_generation, moved.to_training):
        with pytest.raises(RankFailure, match="start again from the last checkpoint"):
            move()


def moved_without_a_piece(way):
    """On each of four ranks: what a move raises if rank 1 has lost a weight of the second bucket."""
    world, layout, config = Group.world(), Layout.parse("1-4-1"), read_config(MODEL)
    groups = generation_groups(layout, "1-1")
    model = Decoder(config, Shard(config, 0, 1, world.rank, 4))
    generator = Decoder(config, Shard(config, 0, 1, 0, 1), device="meta")
    initialize(model, 3)
    moved = Transition(
        model,
        generator,
        [find_held_boxes(config, layout, rank) for rank in range(4)],
        [find_wanted_boxes(config, groups, rank) for rank in range(4)],
        world,
        bucket_bytes=1,
    )
    if way == "back":
        moved.to_generation()
    if world.rank == 1:
        # A norm, which is whole on every rank, so that it is not gathered.
        side = moved.training if way == "there" else moved.generation
        lost = next(name for name in sorted(moved.buckets[1]) if "norm" in name)
        side.pieces[lost] = []
    begin = time.monotonic()
    with pytest.raises((CommError, DataError)) as caught:
        moved.to_generation() if way == "there" else moved.to_training()
    with pytest.raises(RankFailure, match="start again from the last checkpoint"):
        moved.to_generation()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("way", ["there", "back"])
def test_where_one_rank_cannot_move_a_bucket_all_raise_at_once(way, ranks):
    found = ranks.run(moved_without_a_piece, way).results
    kinds, told, seconds = zip(*found, strict=True)
    assert kinds == ("CommError", "DataError", "CommError", "CommError")
    assert "expected a tensor that holds" in told[1]
    assert all("given up when rank 1 raised" in told[k] for k in (0, 2, 3))
    # Messages between these ranks time out after 100 s.
    assert max(seconds) < 80


class TornWorker(ActorWorker):
    """Runs out of memory in the second of many buckets."""

    def __init__(self, *args, failing=(), **settings):
        super().__init__(*args, **settings)
        self.transition.buckets = list(buckets(self.transition.plan, 1))
        side = self.transition.generation
        allocate, calls = side.allocate, itertools.count()

        def tearing(names):
            if self.rank in failing and next(calls) == 1:
                raise MemoryError(f"rank {self.rank} has no room")
            allocate(names)

        side.allocate = tearing


def _torn(pool, failing):
    actor = WorkerGroup(
        TornWorker, pool, MODEL, layout="1-2-1", generate="1-1",
        optimizer=hy.AdamW(lr=1e-2), failing=failing, name="torn",
    )  # fmt: skip
    prompts = hy.tasks.DigitSort(k=2).batch(0, 2)
    roll = Batch(
        tokens=torch.ones(2, 4, dtype=torch.int64), mask=torch.ones(2, 4, dtype=torch.bool),
        lengths=torch.tensor([4, 4]), old_log_probs=torch.zeros(2, 4), advantages=torch.ones(2, 4),
    )  # fmt: skip
    return actor, prompts, roll


def test_weights_that_are_half_way_between_layouts_are_used_for_nothing(pools, tmp_path):
    actor, prompts, roll = _torn(ResourcePool(pools[0].workers, (0, 1)), failing=(0, 1))
    sampling = hy.Sampling(max_new_tokens=2)
    with pytest.raises(RankFailure, match=r"torn\.generate: MemoryError: rank 0 has no room"):
        actor.generate(prompts, sampling).result(60)
    state = ("torn", str(tmp_path / "state"))
    for method, *args in (
        ("generate", prompts, sampling),
        ("log_probs", roll),
        ("update", roll, PolicyUpdate()),
        ("save_state", *state, FileSystemWriter),
        ("export_weights", str(tmp_path), 1 << 20),
    ):
        with pytest.raises(RankFailure, match="lie between training's layout and generation's"):
            actor.call(method, *args).result(60)
    actor.remove()


@pytest.mark.slow
def test_a_rank_that_fails_between_layouts_keeps_nobody_waiting():
    with hy.Workers.local(2) as workers:
        actor, prompts, _ = _torn(workers.pool(2), failing=(1,))
        begin = time.monotonic()
        with pytest.raises(RankFailure, match="MemoryError: rank 1 has no room"):
            actor.generate(prompts, hy.Sampling(max_new_tokens=2)).result(60)
        assert time.monotonic() - begin < 20
        with pytest.raises(RankFailure, match="lie between training's layout and generation's"):
            actor.generate(prompts, hy.Sampling(max_new_tokens=2)).result(60)
