"""Weights between disjoint pools: what travels, what serves meanwhile, and what a failure leaves."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hy
from hybridflow.models.config import read_config
from hybridflow.models.pieces import num_bytes
from hybridflow.reshard import exchange, plan_sync, sync_weights
from hybridflow.reshard.exchange import Holding, WeightRoute, checksum
from hybridflow.roles.actor import ActorWorker
from hybridflow.roles.rollout import Rollout, RolloutWorker
from hybridflow.workers.batch.layout import Layout
from hybridflow.workers.worker_group import WorkerGroup
from shared.comms.group import Group
from shared.errors import CommError, ConfigError, RankFailure

MODEL = "config:tiny-llama"
SAMPLING = hy.Sampling(max_new_tokens=3, num_samples=2)


class Probe(hy.Worker):
    """Reads its rank's ledger."""

    @hy.remote()
    def received(self):
        cells = Group.world().ledger.snapshot().cells
        return sum(
            cell.received_bytes for (op, _, at), cell in cells.items() if (op, at) == OP_AND_PHASE
        )


OP_AND_PHASE = ("reshard", "weights")


class CorruptedWorker(RolloutWorker):
    """Receives other bytes than were sent, the first time."""

    is_first = True

    @hy.remote()
    def stage_weights(self, route):
        sums = super().stage_weights(route)
        if self.is_first:
            self.is_first = False
            key = next(iter(sums))
            sums[key] ^= 1
        return sums


class RaisingWorker(RolloutWorker):
    """Fails once, before it receives anything."""

    is_first = True

    def _second(self):
        if self.is_first:
            self.is_first = False
            raise MemoryError("no room")
        return super()._second()


class StumblingWorker(RolloutWorker):
    """Fails once, when it has received the first of many buckets."""

    is_first = True

    @hy.remote()
    def stage_weights(self, route):
        if not self.is_first:
            return super().stage_weights(route)
        self.is_first = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "checksum", _no_room)
            return super().stage_weights(route)


class RaisingActorWorker(ActorWorker):
    """Fails once, before it sends anything."""

    is_first = True

    def _trained(self):
        if self.is_first:
            self.is_first = False
            raise MemoryError("no room")
        return super()._trained()


def _no_room(values):
    raise MemoryError("no room")


class OtherActor(hy.Actor):
    """An actor of another kind of worker."""

    def __init__(self, kind, pool):
        WorkerGroup.__init__(self, kind, pool, MODEL, name="actor")


class Changed(Rollout):
    """A rollout of another kind of worker."""

    def __init__(self, kind, pool):
        WorkerGroup.__init__(self, kind, pool, MODEL, seed=9, name="changed")
        self.version = 0


def actor_on(pool, **settings):
    return hy.Actor(MODEL, pool, optimizer=hy.AdamW(lr=1e-2), **settings)


def prompts():
    return hy.tasks.DigitSort(k=2).batch(0, 6)


def trainable(roll):
    """What an update wants beside a rollout, for rows that are not there yet."""
    shape = (12, 3 + SAMPLING.max_new_tokens)
    draw = torch.Generator().manual_seed(0)
    columns = hy.Batch(
        advantages=torch.randn(shape, generator=draw), old_log_probs=torch.zeros(shape)
    )
    return roll | columns


def answers(group, step=0):
    return group.generate(prompts(), SAMPLING, step).result()


def assert_same_answers(found, wanted):
    assert torch.equal(found["tokens"], wanted["tokens"])
    torch.testing.assert_close(found["rollout_log_probs"], wanted["rollout_log_probs"])


def test_a_rollout_answers_as_the_actor_and_tells_its_version(pools):
    actor, rollout = actor_on(pools[0]), Rollout(MODEL, pools[1], seed=5)
    assert not torch.equal(answers(rollout)["tokens"], answers(actor)["tokens"])
    for version in range(3):
        assert sync_weights(actor, rollout) == rollout.version == version
        roll = answers(rollout, step=version)
        assert_same_answers(roll, answers(actor, step=version))
        assert roll["versions"][roll["mask"]].unique().tolist() == [version]
        actor.update(trainable(roll)).result()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_bytes_are_those_of_the_plan(pools, bucket_bytes):
    actor, rollout = actor_on(pools[0]), Rollout(MODEL, pools[1])
    probe = WorkerGroup(Probe, pools[1])
    before = probe.received().result()[0]
    sync_weights(actor, rollout, bucket_bytes=bucket_bytes)
    plan = plan_sync(actor, rollout)
    assert probe.received().result()[0] - before == plan.received_bytes[1]
    assert plan.received_bytes == [0, num_bytes(read_config(MODEL), 4)]


def test_calls_that_are_queued_come_first_and_nothing_waits_in_a_circle(pools):
    actor, rollout = actor_on(pools[0]), Rollout(MODEL, pools[1])
    sync_weights(actor, rollout)
    # None of these is waited for before the sync that comes behind them on both sides.
    first = rollout.generate(prompts(), SAMPLING, 0)
    trained = actor.update(trainable(first))
    back = actor.generate(prompts(), SAMPLING, 1)
    known = rollout.log_probs(back)
    assert sync_weights(actor, rollout) == 1
    assert_same_answers(answers(rollout, step=1), back.result())
    assert first["versions"].max() == 0
    assert trained["grad_norm"] > 0
    assert known["log_probs"].shape == back["tokens"].shape


def test_what_arrives_otherwise_is_not_served(pools):
    actor, rollout = actor_on(pools[0]), Changed(CorruptedWorker, pools[1])
    before = answers(rollout)
    with pytest.raises(CommError, match=r"bucket 0 .* expected checksum .*changed.* version 0"):
        sync_weights(actor, rollout)
    assert_same_answers(answers(rollout), before)
    sync_weights(actor, rollout)
    assert_same_answers(answers(rollout), answers(actor))


@pytest.mark.parametrize("who", ["rollout", "rollout between buckets", "actor"])
def test_an_interrupted_sync_leaves_the_old_version_serving_and_keeps_nobody_waiting(pools, who):
    kinds = {"rollout": RaisingWorker, "rollout between buckets": StumblingWorker}
    actor_kind = RaisingActorWorker if who == "actor" else ActorWorker
    actor = OtherActor(actor_kind, pools[0])
    rollout = Changed(kinds.get(who, RolloutWorker), pools[1])
    before = answers(rollout), answers(actor)
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"goes on with version 0(.|\n)*no room") as caught:
        sync_weights(actor, rollout, bucket_bytes=1)
    # Messages between these ranks time out after 100 s.
    assert time.monotonic() - begin < 80
    assert caught.value.rank == (0 if who == "actor" else 1)
    assert f"given up when rank {caught.value.rank} raised" in str(caught.value)
    assert_same_answers(answers(rollout), before[0])
    assert_same_answers(answers(actor), before[1])
    sync_weights(actor, rollout, bucket_bytes=1)
    assert_same_answers(answers(rollout), before[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "is_sharded", "generate", "num_serving"),
    [
        ("1-1-2", True, "1-1", 1),
        ("2-1-1", False, "1-2", 2),
        ("1-2-1", False, "1-1", 2),
        ("1-2-1", False, "2-1", 2),
    ],
)
def test_any_layout_sends_to_any(train, is_sharded, generate, num_serving):
    num_training = Layout.parse(train).num_ranks
    with hy.Workers.local(num_training + num_serving) as workers:
        actor = actor_on(
            workers.pool(num_training), train=train, is_sharded=is_sharded, generate="1-1"
        )
        rollout = Rollout(MODEL, workers.pool(num_serving), generate=generate, seed=5)
        for version in range(2):
            # The actor has generated before, and goes back to training's layout to send.
            wanted = answers(actor)
            assert sync_weights(actor, rollout) == version
            assert_same_answers(answers(rollout), wanted)
            actor.update(trainable(wanted)).result()


@pytest.mark.parametrize("train", ["1-1-1", "2-2-1", "1-4-2", "1-1-3"])
@pytest.mark.parametrize("serve", ["1-1-1", "1-2-2", "1-4-1"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_every_rank_receives_its_shard_once_and_senders_share_the_work(train, serve, is_sharded):
    src, dst = Layout.parse(train), Layout.parse(serve)
    config = read_config("config:small-llama")
    kind = {"config": config, "dtype": torch.bfloat16}
    cut = src.num_ranks
    route = WeightRoute(
        src=Holding(
            name="a", ranks=tuple(range(cut)), layout=src, is_sharded=is_sharded, **kind
        ),
        dst=Holding(
            name="b", ranks=tuple(range(cut, cut + dst.num_ranks)), layout=dst, is_sharded=False,
            **kind,
        ),
        bucket_bytes=1,
    )  # fmt: skip
    plan = route.plan()
    assert plan.received_bytes == [*[0] * cut, *plan.wanted[cut:]]
    assert sum(plan.sent_bytes) == sum(plan.received_bytes)
    if src.pp == 1:
        even = sum(plan.sent_bytes) / cut
        assert max(plan.sent_bytes) <= 1.1 * even


@given(
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50),
    data=st.data(),
)
def test_a_checksum_sees_any_element_that_changes(values, data):
    told = torch.tensor(values, dtype=torch.int16)
    at = data.draw(st.integers(0, len(values) - 1))
    changed = told.clone()
    changed[at] ^= data.draw(st.integers(1, 2**15 - 1))
    assert checksum(told.view(torch.bfloat16)) != checksum(changed.view(torch.bfloat16))
    assert checksum(told.view(torch.bfloat16)) == checksum(told.clone().view(torch.bfloat16))


def test_a_checksum_sees_what_changes_places():
    values = torch.arange(12.0).view(3, 4)
    assert checksum(values) != checksum(values.flip(0))
    assert checksum(values.t()) == checksum(values.t().contiguous())


def test_what_does_not_fit_is_refused():
    with hy.Workers.inline(4) as workers:
        pool, other = workers.pool(1), workers.pool(1)
        actor = actor_on(pool)
        with pytest.raises(ConfigError, match="let the actor generate"):
            sync_weights(actor, Rollout(MODEL, pool))
        with pytest.raises(ConfigError, match="another model than actor"):
            sync_weights(actor, Rollout("config:small-llama", other))
        with pytest.raises(ConfigError, match="another model than actor"):
            sync_weights(actor, Rollout(MODEL, other, dtype="bfloat16"))
        with pytest.raises(ConfigError, match="takes 2 ranks, and there are 1"):
            Rollout(MODEL, other, generate="1-2")
        with pytest.raises(RankFailure, match="inline engine does not"):
            sync_weights(actor, Rollout(MODEL, other))
