"""Loops do what straight-line code does, overlap what they say, and never pass their bound."""

import os
import signal
import time
from dataclasses import dataclass, field

import pytest
import torch

import hybridflow as hy
from hybridflow import algorithms as algos
from hybridflow.algorithms import loops
from hybridflow.roles.actor import ActorWorker
from hybridflow.roles.rollout import Rollout, RolloutWorker
from hybridflow.training.checkpoints.checkpoint import Checkpoint
from hybridflow.workers.worker_group import WorkerGroup
from shared.errors import ConfigError, RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

MODEL = "config:tiny-llama"
TASK = hy.tasks.DigitSort(k=2)
BATCH_SIZE = 8
SAMPLING = hy.Sampling(max_new_tokens=2, num_samples=4)


def prompts(step):
    return TASK.batch(step, BATCH_SIZE)


def score(roll):
    """What random weights earn too, so that every step is a step: even tokens are good."""
    return hy.Batch(rewards=(roll["tokens"] % 2 == 0) * roll["mask"] / 2.0)


def sorted_digits(roll):
    return TASK.token_rewards(roll, TASK.tokenizer)


@dataclass(kw_only=True)
class Recorded(algos.GRPO):
    """Keeps what it learns from."""

    learnt: list = field(default_factory=list)

    def learn(self, roll):
        self.learnt.append(roll if isinstance(roll, hy.Batch) else roll.result())
        return super().learn(roll)


def actor_on(pool):
    return hy.Actor(MODEL, pool, optimizer=hy.AdamW(lr=3e-3))


def recorded(pool, scored=score):
    return Recorded(actor=actor_on(pool), score=scored, sampling=SAMPLING)


def assert_same(found, wanted):
    """Tokens, versions and what steps told, to the bit."""
    (algorithm, told), (other, told_there) = found, wanted
    assert told == told_there
    for ours, theirs in zip(algorithm.learnt, other.learnt, strict=True):
        for name in ("tokens", "rollout_log_probs", "versions", "sample_ids", "group"):
            assert torch.equal(ours[name], theirs[name]), name


def without_staleness(told):
    return [{name: value for name, value in step.items() if name != "staleness"} for step in told]


# In this process.


def test_sync_is_straight_line_code_and_goes_on_from_a_step():
    seen = []
    with hy.Workers.inline() as workers:
        algorithm = recorded(workers.pool(1))
        told = list(loops.run(algorithm, prompts, steps=2))
        told += loops.run(
            algorithm, prompts, steps=1, start=2, on_step=lambda *step: seen.append(step)
        )
    with hy.Workers.inline() as workers:
        other = recorded(workers.pool(1))
        wanted = [dict(other.learn(other.rollout(prompts(step), step))) for step in range(3)]
    assert_same((algorithm, told), (other, wanted))
    assert seen == [(2, told[2])]


def test_correction_weighs_by_how_likely_the_actor_now_is_to_draw():
    with hy.Workers.inline() as workers:
        algorithm = recorded(workers.pool(1))
        correct = loops.Correction(actor=algorithm.actor, cap=1.05)
        drawn = algorithm.rollout(prompts(0), 0)
        same = correct(drawn)
        mask = drawn["mask"]
        torch.testing.assert_close(same["loss_weights"], mask.float(), rtol=1e-5, atol=1e-5)
        algorithm.learn(drawn)
        later = correct(drawn)
        ratio = (later["rollout_log_probs"] - later["sampler_log_probs"]).exp() * mask
        assert torch.equal(later["sampler_log_probs"], drawn["rollout_log_probs"])
        torch.testing.assert_close(later["loss_weights"], ratio.clamp(max=1.05))
        assert (ratio > 1.05).any()
        assert dict(algorithm.learn(later))["loss"] != 0


def off_policy_by_one(algorithm, steps):
    """What `OneStep` is to do, by the actor alone: the next batch is drawn before each update."""
    told, drawn = [], algorithm.rollout(prompts(0), 0).result()
    for step in range(steps):
        following = algorithm.rollout(prompts(step + 1), step + 1).result()
        told.append(dict(algorithm.learn(drawn)))
        drawn = following
    return told


# On two pools.


def test_one_step_learns_what_straight_line_code_learns_off_policy_by_one(pools):
    algorithm = recorded(pools[0], sorted_digits)
    loop = loops.OneStep(
        algorithm=algorithm, rollout=Rollout(MODEL, pools[1], seed=5), prompts=prompts
    )
    told = [*loop.run(2), *loop.run(1)]
    assert loop.step == 3
    other = recorded(pools[0], sorted_digits)
    assert_same((algorithm, told), (other, off_policy_by_one(other, 3)))


def test_remax_takes_its_baseline_from_who_draws(pools):
    sampling = hy.Sampling(max_new_tokens=2)
    told = []
    for rollout in (Rollout(MODEL, pools[1], seed=5), None):
        algorithm = algos.ReMax(actor=actor_on(pools[0]), score=score, sampling=sampling)
        if rollout is None:
            told.append(off_policy_by_one(algorithm, 3))
        else:
            loop = loops.OneStep(algorithm=algorithm, rollout=rollout, prompts=prompts)
            told.append(list(loop.run(3)))
            drawn = loop.state()["drawn"]
            # The actor is a step ahead of the weights that drew both.
            greedy = algorithm.actor.greedy(prompts(3), sampling).result()
            assert drawn["versions"].max() == 2
            assert greedy["greedy_tokens"].shape == drawn["greedy_tokens"].shape
    assert told[0] == told[1]


class MeetingActorWorker(ActorWorker):
    """Trains while the rollout draws, or not at all: both wait until the other has begun."""

    def __init__(self, model, *, folder, **settings):
        super().__init__(model, **settings)
        self.folder, self.spans = folder, []

    @hy.remote(protocol="3d-metrics")
    def update(self, batch, settings):
        start = time.monotonic()
        # Opening a pipe takes two: this ends when the other side opens it.
        os.close(os.open(f"{self.folder}/{self.version + 1}", os.O_WRONLY))
        told = super().update(batch, settings)
        self.spans.append((start, time.monotonic()))
        return told

    @hy.remote()
    def intervals(self):
        return self.spans


class MeetingRolloutWorker(RolloutWorker):
    """Draws for a step while the step before is learnt from."""

    def __init__(self, model, *, folder, **settings):
        super().__init__(model, **settings)
        self.folder, self.spans = folder, []

    @hy.remote(protocol="3d-all-micro-dp")
    def generate(self, batch, sampling, step=0):
        start = time.monotonic()
        if step:
            os.close(os.open(f"{self.folder}/{step}", os.O_RDONLY))
        found = super().generate(batch, sampling, step)
        self.spans.append((start, time.monotonic()))
        return found

    @hy.remote()
    def intervals(self):
        return self.spans


class MeetingActor(hy.Actor):
    """An actor of such workers."""

    def __init__(self, pool, folder):
        adam = hy.AdamW(lr=3e-3)
        WorkerGroup.__init__(self, MeetingActorWorker, pool, MODEL, folder=folder, optimizer=adam)


class MeetingRollout(Rollout):
    """A rollout of such workers."""

    def __init__(self, pool, folder):
        WorkerGroup.__init__(self, MeetingRolloutWorker, pool, MODEL, folder=folder)
        self.version = 0


@pytest.mark.parametrize("kind", ["one_step", "asynchronous"])
def test_the_next_batch_is_drawn_while_one_is_learnt_from(pools, tmp_path, kind):
    for step in range(1, 4):
        os.mkfifo(tmp_path / str(step))
    actor, rollout = (
        MeetingActor(pools[0], str(tmp_path)),
        MeetingRollout(pools[1], str(tmp_path)),
    )
    algorithm = algos.GRPO(actor=actor, score=score, sampling=SAMPLING)
    if kind == "one_step":
        loop = loops.OneStep(algorithm=algorithm, rollout=rollout, prompts=prompts)
    else:
        loop = loops.Asynchronous(algorithm=algorithm, rollouts=[rollout], prompts=prompts, eta=1)
    list(loop.run(3))
    drawn, learnt = rollout.intervals().result()[0], actor.intervals().result()[0]
    assert (len(drawn), len(learnt)) == (4, 3)
    for (begun, ended), (start, stop) in zip(drawn[1:], learnt, strict=True):
        assert max(begun, start) < min(ended, stop)


def test_eta_0_is_the_synchronous_loop_to_the_bit(pools):
    algorithm, other = recorded(pools[0]), recorded(pools[0])
    loop = loops.Asynchronous(
        algorithm=algorithm, rollouts=[Rollout(MODEL, pools[1], seed=5)], prompts=prompts, eta=0
    )
    told = list(loop.run(5))
    assert [step["staleness"] for step in told] == [0] * 5
    wanted = list(loops.run(other, prompts, steps=5, rollout=Rollout(MODEL, pools[1], seed=6)))
    assert_same((algorithm, without_staleness(told)), (other, wanted))
    versions = [batch["versions"][batch["mask"]].unique().tolist() for batch in algorithm.learnt]
    assert versions == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("eta", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_token_is_staler_than_eta_and_batches_are_whole(pools, eta):
    algorithm = recorded(pools[0])
    loop = loops.Asynchronous(
        algorithm=algorithm,
        rollouts=[Rollout(MODEL, pools[1], seed=seed) for seed in (5, 6)],
        prompts=prompts,
        eta=eta,
        chunk=3,
        max_running=9,
        correct=loops.Correction(actor=algorithm.actor),
    )
    told = list(loop.run(6))
    for step, batch in enumerate(algorithm.learnt):
        versions = batch["versions"][batch["mask"]]
        assert step - eta <= versions.min() <= versions.max() <= step
        assert told[step]["staleness"] == step - versions.min()
        wanted = prompts(step)["sample_ids"].repeat_interleave(SAMPLING.num_samples)
        assert torch.equal(batch["sample_ids"], wanted)


class Faulty(Rollout):
    """Raises on its rank when it draws for a step."""

    def generate(self, batch, sampling, step=0):
        if step == 1:
            batch = batch.select(*batch)
            batch["prompt_lengths"] = torch.zeros(len(batch), dtype=torch.int64)
        return super().generate(batch, sampling, step)


def test_the_prompts_of_a_rollout_that_raises_are_given_to_others(pools, caplog):
    algorithm = recorded(pools[0])
    loop = loops.Asynchronous(
        algorithm=algorithm,
        rollouts=[Rollout(MODEL, pools[1]), Faulty(MODEL, pools[1], name="faulty")],
        prompts=prompts,
        eta=0,
    )
    list(loop.run(3))
    assert "faulty failed, and 1 are left" in caplog.text
    for step, batch in enumerate(algorithm.learnt):
        wanted = prompts(step)["sample_ids"].repeat_interleave(SAMPLING.num_samples)
        assert torch.equal(batch["sample_ids"], wanted)
        assert batch["versions"][batch["mask"]].unique().tolist() == [step]


def test_the_last_rollout_that_raises_ends_the_run(pools):
    loop = loops.Asynchronous(
        algorithm=recorded(pools[0]), rollouts=[Faulty(MODEL, pools[1])], prompts=prompts, eta=1
    )
    with pytest.raises(RankFailure, match=r"last of the rollouts(.|\n)*at least one token"):
        list(loop.run(3))


@pytest.mark.slow  # needs ranks of its own
def test_a_rank_that_dies_ends_the_run():
    with hy.Workers.local(3) as workers:
        algorithm = recorded(workers.pool(1))
        loop = loops.Asynchronous(
            algorithm=algorithm,
            rollouts=[Rollout(MODEL, workers.pool(1)), Rollout(MODEL, workers.pool(1))],
            prompts=prompts,
        )
        told = loop.run(3)
        next(told)
        os.kill(workers.engine.pids[2], signal.SIGKILL)
        with pytest.raises(RankFailure, match="rank 2 of 3 died: killed by SIGKILL"):
            list(told)


def loop_of(kind, pools):
    algorithm, rollout = recorded(pools[0]), Rollout(MODEL, pools[1], seed=5)
    if kind == "one_step":
        return loops.OneStep(algorithm=algorithm, rollout=rollout, prompts=prompts)
    eta = int(kind.removeprefix("eta "))
    return loops.Asynchronous(algorithm=algorithm, rollouts=[rollout], prompts=prompts, eta=eta)


@pytest.mark.parametrize(("kind", "steps"), [("one_step", 2), ("eta 0", 2), ("eta 2", 1)])
def test_a_run_goes_on_from_what_was_saved(pools, tmp_path, kind, steps):
    loop, resumed, checkpoint = loop_of(kind, pools), loop_of(kind, pools), Checkpoint(tmp_path)
    states = []

    def save(step, _):
        if step == 1:
            states.append(loop.state())
            checkpoint.save(step, {"actor": loop.algorithm.actor}, states[0])

    told = list(loop.run(2 + steps, on_step=save))
    resumed.load_state(checkpoint.load({"actor": resumed.algorithm.actor}))
    again = list(resumed.run(steps))
    loop.algorithm.learnt = loop.algorithm.learnt[2:]
    assert_same((resumed.algorithm, again), (loop.algorithm, told[2:]))
    if kind == "eta 2":  # the batch that was drawn already, not one drawn anew
        finished = states[0]["buffer"]["finished"]
        assert finished[:BATCH_SIZE] == list(range(2 * BATCH_SIZE, 3 * BATCH_SIZE))


def test_no_rollout_is_refused(pools):
    with pytest.raises(ConfigError, match="at least one rollout"):
        loops.Asynchronous(algorithm=recorded(pools[0]), rollouts=[], prompts=prompts)
