"""Every algorithm learns for real, from random weights; a policy that is not updated does not."""

from dataclasses import replace

import pytest
import torch

from hybridflow.controller import Workers
from hybridflow.recipe import built_in, read_recipe
from hybridflow.rollout.sampling import Sampling
from hybridflow.training import Run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learnt(recipe):
    """Greedy exact match before and after, and rewards."""
    with Workers.inline() as workers:
        run = Run.set_up(recipe, workers)
        before = run.greedy()
        told = list(run.steps())
        return before, run.greedy(), [step["reward"] for step in told]


@pytest.mark.parametrize(("name", "steps", "least"), [("ppo", 80, 0.9), ("grpo", 120, 0.6)])
def test_two_digits_are_sorted_and_an_untrained_policy_fails(name, steps, least):
    before, after, rewards = learnt(replace(read_recipe(f"{name}-sort"), steps=steps))
    assert before < 0.3
    assert after >= least
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


def test_a_rate_of_zero_teaches_nothing():
    recipe = read_recipe("ppo-sort", {"steps": "10", "optimizer.lr": "0"})
    before, after, rewards = learnt(recipe)
    assert before == after < 0.3
    assert max(rewards) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(built_in()))
def test_every_recipe_learns(name):
    before, after, rewards = learnt(read_recipe(name))
    assert before < 0.3
    assert after >= 0.6
    assert rewards[-1] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "steps", "least"), [("ppo", 500, 0.9), ("grpo", 700, 0.6)])
def test_three_digits_are_sorted(name, steps, least, seed):
    """Prompts like those of training, drawn anew; of those held out a few percent less are right."""
    recipe = replace(read_recipe(f"{name}-sort"), task="digit-sort:3", steps=steps, seed=seed)
    with Workers.inline() as workers:
        run = Run.set_up(recipe, workers)
        assert run.greedy() < 0.1
        for _ in run.steps():
            pass
        fresh = run.task.batch(10 * steps, 512)
        greedy = Sampling(max_new_tokens=3, temperature=0)
        found = run.task.exact_match(run.algorithm.actor.generate(fresh, greedy).result())
        assert found >= least
        assert run.greedy() >= least - 0.1


def test_safe_rlhf_holds_the_cost_that_it_is_given():
    recipe = read_recipe("safe-sort", {"steps": "12", "batch_size": "128"})
    with Workers.inline() as workers:
        told = list(Run.set_up(recipe, workers).steps())
    assert told[-1]["cost"] < told[0]["cost"] or told[0]["cost"] <= -0.05
    # The constraint is met, so that its multiplier falls.
    assert told[-1]["multiplier"] < 1


def steps_of(make, num_ranks):
    recipe = replace(read_recipe("ppo-sort"), steps=5, batch_size=64)
    place = replace(recipe.placement, num_ranks=num_ranks)
    with make(num_ranks) as workers:
        run = Run.set_up(replace(recipe, placement=place), workers)
        told = []
        for step in range(recipe.steps):
            roll = run.algorithm.rollout(run.prompts(step), step).result()
            told.append((roll["tokens"], run.algorithm.learn(roll)))
        return told


def test_one_and_two_ranks_draw_the_same_tokens_and_lose_the_same():
    one = steps_of(Workers.inline, 1)
    two = steps_of(Workers.local, 2)
    for (tokens, told), (others, other) in zip(one, two, strict=True):
        assert torch.equal(tokens, others)
        for name in ("loss", "value_loss", "grad_norm", "entropy"):
            assert told[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
