"""What holds for every algorithm: whom the first update sees, and what a dropped row leaves out."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import hybridflow as hy
from hybridflow.algorithms.dataflow import measure_unmoved
from hybridflow.roles.actor import PolicyUpdate
from hybridflow.training.config import built_in, read_recipe
from hybridflow.training.runtime import Run
from hybridflow.workers.controller import Workers
from shared.errors import ConfigError, DataError, RankFailure


@pytest.mark.parametrize("name", sorted(built_in()))
def test_ratios_are_one_at_any_temperature_before_weights_have_moved(name):
    recipe = replace(read_recipe(name), temperature=0.6, steps=1, batch_size=32, num_updates=1)
    with Workers.inline() as workers:
        (told,) = Run.set_up(recipe, workers).steps()
    assert told["ratio"] == pytest.approx(1, abs=1e-5)
    assert told["k3"] == pytest.approx(0, abs=1e-6)


def test_the_reference_is_asked_at_the_temperature_of_drawing():
    recipe = replace(
        read_recipe("grpo-sort"), temperature=0.6, steps=1, batch_size=32, num_updates=1, beta=0.1
    )
    with Workers.inline() as workers:
        (told,) = Run.set_up(recipe, workers).steps()
    # The same weights at the same temperature: nothing has diverged.
    assert told["kl"] == pytest.approx(0, abs=1e-6)


TASK = hy.tasks.DigitSort(k=2)
# Of six groups of three: one that loses its greatest score, one its least, one none.
DROPPED = torch.tensor([0, 5, 13])


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def score_of(roll, bad=()):
    """A number for each sample, whatever the response is; rows `bad` have none."""
    scores = ((roll["sample_ids"] * 7 + roll["tokens"].sum(1) * 3) % 11).float()
    batch = hy.Batch(scores=scores)
    if len(bad):
        batch["is_dropped"] = torch.zeros(len(roll), dtype=torch.bool)
        batch["is_dropped"][bad] = True
        # What stands there is not to be seen in any mean.
        batch["scores"][bad] = 1000.0
    return batch


def costs_of(roll):
    return hy.Batch(costs=(roll["tokens"].sum(1) % 3).float() - 0.5)


def an_algorithm(name, pool, score):
    optimizer = hy.AdamW(lr=1e-2)
    model = {**hy.PRESETS["tiny-llama"], "vocab_size": 16}
    num_samples = 1 if name == "ReMax" else 3
    common = {
        "actor": hy.Actor(model, pool, optimizer=optimizer, dtype="float64"),
        "sampling": hy.Sampling(max_new_tokens=3, num_samples=num_samples),
        "score": score,
    }
    if name != "ReMax":
        common["reference"] = hy.Reference(model, pool, seed=3, dtype="float64")
    if name == "GRPO":
        return hy.algos.GRPO(kl_coefficient=0.1, mode="seq-mean-token-mean", **common)
    if name in ("PPO", "SafeRLHF"):
        common["critic"] = hy.Critic(model, pool, optimizer=optimizer, dtype="float64")
    if name == "SafeRLHF":
        common["cost"] = costs_of
        common["cost_critic"] = hy.Critic(model, pool, optimizer=optimizer, dtype="float64", seed=9)
    if name == "PPO":
        common["beta"] = hy.rl.kl.AdaptiveKL(beta=0.1, target=0.01, horizon=100)
    elif name != "ReMax":
        common["beta"] = 0.1
    return getattr(hy.algos, name)(**common)


def learnt(name, rows=None, bad=()):
    """What a step tells, and the log-probabilities of its responses after it."""
    with Workers.inline() as workers:
        algorithm = an_algorithm(name, workers.pool(1), partial(score_of, bad=bad))
        num_prompts = 18 if name == "ReMax" else 6
        roll = algorithm.rollout(TASK.batch(0, num_prompts), 0).result()
        told = algorithm.learn(roll if rows is None else roll.reorder(rows))
        after = algorithm.actor.log_probs(roll).result()["log_probs"]
        beta = getattr(algorithm, "beta", None)
        return {**told, "beta": getattr(beta, "beta", 0.0)}, after


@pytest.mark.parametrize("name", ["PPO", "GRPO", "RLOO", "ReinforcePlusPlus", "ReMax", "SafeRLHF"])
def test_dropped_rows_are_as_if_they_were_not_there(name):
    kept = torch.tensor([row for row in range(18) if row not in DROPPED])
    told, after = learnt(name, bad=DROPPED)
    expected, wanted = learnt(name, rows=kept)
    assert told.pop("num_dropped") == len(DROPPED)
    assert told == pytest.approx(expected, rel=1e-9)
    assert told["grad_norm"] > 1e-3
    torch.testing.assert_close(after, wanted, rtol=1e-9, atol=1e-9)


def test_a_batch_of_equals_is_skipped():
    with Workers.inline() as workers:
        algorithm = an_algorithm(
            "RLOO", workers.pool(1), lambda roll: hy.Batch(scores=torch.full((18,), 0.7))
        )
        algorithm.beta = 0.0
        roll = algorithm.rollout(TASK.batch(0, 6), 0).result()
        before = algorithm.actor.log_probs(roll).result()["log_probs"]
        told = algorithm.learn(roll)
        assert told["is_skipped"] == told["equal_groups"] == 1
        assert told["loss"] == 0
        assert algorithm.actor.num_updates().result() == 0
        assert torch.equal(algorithm.actor.log_probs(roll).result()["log_probs"], before)


@pytest.mark.parametrize(
    ("name", "num_samples", "told"),
    [
        ("GRPO", 1, "a group needs two responses or more, got 1"),
        ("RLOO", 1, "a group needs two responses or more, got 1"),
        ("ReMax", 2, "expected 1 for ReMax"),
    ],
)
def test_numbers_of_responses_that_leave_no_baseline_are_refused(name, num_samples, told):
    with Workers.inline() as workers:
        algorithm = an_algorithm(name, workers.pool(1), score_of)
        sampling = hy.Sampling(max_new_tokens=3, num_samples=num_samples)
        with pytest.raises(ConfigError, match=told):
            replace(algorithm, sampling=sampling)


def test_columns_that_are_learnt_from_are_asked_for_by_name():
    with Workers.inline() as workers:
        pool = workers.pool(1)
        remax, rloo = (an_algorithm(name, pool, score_of) for name in ("ReMax", "RLOO"))
        drawn = remax.actor.generate(TASK.batch(0, 18), remax.sampling, 0).result()
        with pytest.raises(ConfigError, match=r"expected column greedy_tokens; draw .* by ReMax"):
            remax.learn(drawn)
        drawn = rloo.rollout(TASK.batch(0, 6), 0).result()
        with pytest.raises(DataError, match="no column 'rollout_log_probs'; there are"):
            rloo.learn(drawn.drop("rollout_log_probs"))


def test_a_batch_of_dropped_rows_moves_nothing():
    for name in ("RLOO", "GRPO", "PPO", "SafeRLHF"):
        told, _ = learnt(name, bad=torch.arange(18))
        assert told.get("grad_norm") is None
        assert told.get("value_loss", 0.0) == 0.0
        assert told["is_skipped"] == 1
        assert told["reward"] == told["loss"] == 0
        assert told["num_dropped"] == 18
        assert told.get("multiplier", 1.0) == 1


def test_a_row_whose_greedy_response_has_no_reward_is_dropped():
    def score(roll):
        is_greedy = not torch.equal(roll["tokens"], drawn["tokens"])
        return score_of(roll, bad=DROPPED[:2] if is_greedy else DROPPED[1:])

    with Workers.inline() as workers:
        algorithm = an_algorithm("ReMax", workers.pool(1), score)
        drawn = algorithm.rollout(TASK.batch(0, 18), 0).result()
        assert algorithm.learn(drawn)["num_dropped"] == 3


def test_groups_that_teach_nothing_are_counted():
    gains = torch.tensor([0.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0])
    group = torch.tensor([4, 4, 7, 7, 2, 2, 9])
    assert measure_unmoved(gains, group) == 0.5
    told, _ = learnt("RLOO", bad=torch.tensor([0, 1, 3, 4, 5]))
    assert told["equal_groups"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"scores": torch.zeros(17)}, "'rewards' or 'scores' for 18 rows"),
        ({"costs": torch.zeros(18)}, "'rewards' or 'scores' for 18 rows"),
        ({"scores": torch.zeros(18, 6)}, r"scores: expected a tensor \[18\].*float32\[18, 6\]"),
        ({"scores": [0.5] * 18}, r"scores: expected a tensor \[18\].*scores: objects"),
        ({"rewards": torch.zeros(18)}, r"rewards: expected a tensor \[18, 6\].*float32\[18\]"),
        ({"rewards": torch.zeros(18, 3)}, r"rewards: expected a tensor \[18, 6\].*\[18, 3\]"),
        ({"scores": torch.full((18,), math.nan)}, r"row 0 \(sample 0\) is nan; make the reward"),
        (
            {"scores": torch.zeros(18), "is_dropped": torch.zeros(18)},
            r"is_dropped: expected bool \[18\]",
        ),
    ],
)
def test_rewards_of_another_shape_are_refused(found, told):
    with Workers.inline() as workers:
        algorithm = an_algorithm("RLOO", workers.pool(1), lambda roll: hy.Batch(found))
        roll = algorithm.rollout(TASK.batch(0, 6), 0)
        with pytest.raises(DataError, match=told):
            algorithm.learn(roll)


def mean_loss(logp, old_logp, advantages, mask):
    return -(advantages * logp).mean()


def loss_of_rows(logp, old_logp, advantages, mask):
    return -(advantages * logp).sum(1)


def no_tensor(logp, old_logp, advantages, mask):
    return (-(advantages * logp), {})


@pytest.mark.parametrize(
    ("loss", "came"),
    [(mean_loss, r"shape \[\]"), (loss_of_rows, r"shape \[6\]"), (no_tensor, "tuple")],
)
def test_losses_of_another_shape_are_refused(loss, came):
    with Workers.inline() as workers:
        model = {**hy.PRESETS["tiny-llama"], "vocab_size": 16}
        actor = hy.Actor(model, workers.pool(1), optimizer=hy.AdamW())
        # As many rows as tokens: a number for each row would spread over tokens unseen.
        roll = actor.generate(TASK.batch(0, 6), hy.Sampling(max_new_tokens=3)).result()
        assert roll["tokens"].shape == (6, 6)
        batch = roll | hy.Batch(
            advantages=roll["mask"].float(), old_log_probs=roll["rollout_log_probs"]
        )
        with pytest.raises(RankFailure, match=rf"expected one .*, shape \[6, 6\], got {came}"):
            actor.call("update", batch, PolicyUpdate(loss=loss)).result()


def test_costs_of_another_shape_are_refused():
    with Workers.inline() as workers:
        algorithm = an_algorithm("SafeRLHF", workers.pool(1), score_of)
        algorithm.cost = lambda roll: hy.Batch(costs=torch.zeros(18, 6))
        with pytest.raises(DataError, match=r"costs: expected a tensor \[18\]"):
            algorithm.learn(algorithm.rollout(TASK.batch(0, 6), 0))


class Failed(dict):
    """Metrics of an update that failed, which say so when they are looked at."""

    def __getitem__(self, name):
        raise RankFailure("this critic has no optimizer")


@pytest.mark.parametrize("critic", ["critic", "cost_critic"])
def test_critics_that_can_not_be_trained_are_told_of(critic, monkeypatch):
    with Workers.inline() as workers:
        algorithm = an_algorithm("SafeRLHF", workers.pool(1), score_of)
        monkeypatch.setattr(getattr(algorithm, critic), "update", lambda *_, **__: Failed())
        with pytest.raises(RankFailure, match="this critic has no optimizer"):
            algorithm.learn(algorithm.rollout(TASK.batch(0, 6), 0))
