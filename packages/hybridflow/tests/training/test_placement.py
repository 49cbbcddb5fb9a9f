"""Recipes that place models on several pools, take turns otherwise, or have a server draw."""

import json
from dataclasses import replace

import pytest
import torch

from hybridflow.cli import main
from hybridflow.training.config import read_recipe, write_recipe
from hybridflow.training.runtime import Run
from hybridflow.workers.controller import Workers
from hybridflow.workers.timeline import Span, cut_overlaps
from shared.errors import ConfigError

from ..rollout.stand_in import StandIn

APART = {
    "steps": "3", "batch_size": "32", "optimizer.schedule": "constant",
    "placement.engine": "local", "placement.pools": "{learn: 1, draw: 1}",
    "placement.models": "{rollout: {pool: draw}}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"placement.pools": "{a: 0}"}, r"placement.pools.a: expected 1 rank or more, got 0"),
        ({"placement.models": "{actr: {pool: all}}"}, r"placement.models: expected one of actor,"),
        ({"placement.models": "{actor: {pool: b}}"}, r"actor.pool: expected one of all, got 'b'"),
        (
            {"placement.models": "{actor: {}}"},
            r"placement.models.actor.pool: expected a value, got none",
        ),
        ({"placement.pools": "{a: 1, b: 1}"}, r"expected one rank with the inline engine, got 2"),
        (
            {"placement.pools": "{a: 1}", "placement.num_ranks": "2"},
            r"num_ranks or pools, got both",
        ),
        ({"placement.address": "here:1"}, r"placement.address: engine 'inline' has none"),
        ({"loop.kind": "asink"}, r"loop.kind: expected one of sync, one-step, async, got 'asink'"),
        ({"loop.kind": "one-step"}, r"placement.models.rollout: loop 'one-step' needs a rollout"),
        ({"loop.correct": "token"}, r"loop.correct: loop 'sync'"),
        ({"loop.eta": "-1"}, r"loop.eta: expected 0 or more"),
        ({"loop.eta": "3"}, r"loop.eta: loop 'sync' has no eta; only async has"),
        ({"loop.kind": "async", "loop.cap": "3"}, r"loop.cap: it bounds the weights of loop.corr"),
        ({"server.log_probs_mode": "processed_logprobs"}, r"server.log_probs_mode: .* kind 'vllm'"),
        ({"placement.models": "{critic: {pool: all}}"}, r"models.critic: this run has no such mod"),
        ({"placement.models": "{reference: {pool: all}}"}, r"grpo with .* has actor, rollout$"),
        ({"loop.kind": "async", "placement.models": "{rollout: {pool: all}}"}, r"another pool"),
        (
            {
                "loop.kind": "async",
                "placement.engine": "local",
                "placement.pools": "{a: 1, b: 1}",
                "placement.models": "{rollout: {pool: b}, reward: {pool: b}}",
                "reward": "config:tiny-llama",
            },
            r"placement.models.reward.pool: 'b' is the rollout's",
        ),
        ({"placement.num_ranks": "0"}, r"placement.num_ranks: expected 1 rank or more, got 0"),
        ({"server.kind": "vllm"}, r"server: kind, url and folder go together"),
        (
            {"server": "{kind: vllm, url: 'http://h:1', folder: f}"},
            r"placement.models.rollout: a server needs a rollout",
        ),
    ],
)
def test_placements_that_can_not_be_are_told(changes, told):
    with pytest.raises(ConfigError, match=told):
        read_recipe("grpo-sort", changes)


def test_what_a_change_makes_useless_can_be_dropped():
    changes = {"loop.eta": "3", "placement.models": "{critic: {pool: all}}"}
    dropped = {"loop": "null", "placement.models.critic": "null"}
    assert read_recipe("grpo-sort", {**changes, **dropped}) == read_recipe("grpo-sort")


def test_a_recipe_is_written_as_it_is_read(tmp_path):
    changes = {**APART, "loop.kind": "one-step", "loop.correct": "token", "beta": "0.1"}
    recipe = read_recipe("grpo-sort", changes)
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    assert "  eta:" not in (tmp_path / "recipe.yaml").read_text()


def run_of(recipe, workers, checkpoint=None):
    workers.clear()
    return list(Run.set_up(recipe, workers).steps(checkpoint))


def same(ours, theirs):
    """What is told of a step but for how long it took, equal to the bit."""
    kept = [
        [{k: v for k, v in told.items() if not k.endswith(("_s", "seconds"))} for told in run]
        for run in (ours, theirs)
    ]
    return kept[0] == kept[1]


def test_models_on_several_pools_learn_as_on_one(two):
    one = read_recipe("ppo-sort", {"steps": "2", "batch_size": "32", "beta": "0.05"})
    with Workers.inline() as workers:
        expected = list(Run.set_up(one, workers).steps())
    places = "{critic: {pool: b}, reference: {pool: b}, rollout: {pool: b}}"
    changes = {"engine": "local", "pools": "{a: 1, b: 1}", "models": places}
    apart = read_recipe(
        "ppo-sort",
        {"steps": "2", "batch_size": "32", "beta": "0.05"}
        | {f"placement.{key}": value for key, value in changes.items()},
    )
    run = Run.set_up(apart, two)
    found = list(run.steps())
    assert same(found, expected)
    assert "actor.generate_s" not in found[0]
    ranks = {span.name: span.rank for span in run.spans}
    assert (ranks["actor.update"], ranks["critic.values"], ranks["rollout.generate"]) == (0, 1, 1)
    assert ranks["reference.reference"] == 1


@pytest.mark.parametrize("kind", ["one-step", "async"])
def test_an_interrupted_loop_goes_on_to_the_same_end(kind, two, tmp_path):
    from hybridflow.training.checkpoints.checkpoint import Checkpoint

    recipe = read_recipe("grpo-sort", {**APART, "loop.kind": kind, "loop.correct": "token"})
    whole = run_of(replace(recipe, steps=4), two)
    first = run_of(replace(recipe, steps=2), two, Checkpoint(tmp_path))
    rest = run_of(replace(recipe, steps=4), two, Checkpoint(tmp_path))
    assert same([*first, *rest], whole)
    assert [told["step"] for told in rest] == [2, 3]


@pytest.mark.slow
def test_a_loop_is_chosen_on_the_command_line(tmp_path):
    changes = [f"{key}={value}" for key, value in {**APART, "loop.kind": "async"}.items()]
    several = [word for change in changes for word in ("--set", change)]
    assert main(["train", "grpo-sort", *several, "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["staleness"] == 0
    assert all(line["staleness"] <= 1 for line in lines)
    assert all(line["rollout.generate_s"] > 0 for line in lines[1:])


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_a_server_draws_with_the_weights_of_each_step(kind, two, tmp_path):
    from hybridflow.roles.state.export import export

    recipe = read_recipe("grpo-sort", {"batch_size": "32"})
    with Workers.inline() as workers:
        run = Run.set_up(recipe, workers)
        folder = export(run.algorithm.actor, tmp_path / "start")
    config = json.loads((folder / "config.json").read_text())
    server = StandIn(kind, folder, config)
    places = {
        "engine": "local", "pools": {"learn": 1, "ask": 1}, "models": {"rollout": {"pool": "ask"}},
    }  # fmt: skip
    try:
        served = read_recipe(
            "grpo-sort",
            {
                "steps": "2", "batch_size": "32", "placement": json.dumps(places),
                "server": json.dumps({"kind": kind, "url": server.url, "folder": str(tmp_path)}),
            },
        )  # fmt: skip
        run = Run.set_up(served, two)
        told = list(run.steps())
        last = run.rollout.take_weights(run.algorithm.actor)
        prompts = run.prompts(2)
        sampling = replace(run.algorithm.sampling, temperature=0, num_samples=1)
        theirs = run.rollout.generate(prompts, sampling).result()
        ours = run.algorithm.actor.generate(prompts, sampling).result()
        # The weights that were learnt reached the server: its likeliest tokens are the actor's.
        assert torch.equal(theirs["tokens"], ours["tokens"])
        assert theirs["versions"].max() == last == 4
        assert server.label == "3"
        # What responses were drawn with is what they are learnt with.
        assert all(line["k3"] < 0.05 for line in told)
        kept = sorted(path.name for path in tmp_path.glob("weights-*"))
        assert kept == ["weights-2", "weights-4"]
    finally:
        server.close()


def test_a_reward_model_scores_on_a_pool_of_its_own(two):
    changes = {
        "steps": "1", "batch_size": "32", "reward": "config:tiny-llama",
        "placement.engine": "local", "placement.pools": "{a: 1, b: 1}",
        "placement.models": "{reward: {pool: b}}",
    }  # fmt: skip
    run = Run.set_up(read_recipe("grpo-sort", changes), two)
    (told,) = run.steps()
    assert set(run.groups) == {"actor"}
    assert told["reward.scores_s"] > 0
    assert {span.rank for span in run.spans if span.name == "reward.scores"} == {1}
    roll = run.algorithm.rollout(run.prompts(0), 0)
    scores = run.algorithm.score(roll.result()).result()["scores"]
    assert len(scores) == 32
    assert scores.std() > 0


def test_a_mapping_is_written_as_a_recipe_that_runs(two, tmp_path, capsys):
    path = tmp_path / "placed.yaml"
    arguments = ["map", "--recipe", "ppo-sort", "--gpus", "2", "--out", str(path)]
    sizes = ["--set", "steps=1", "batch_size=32", "beta=0.1"]
    assert main([*arguments, *sizes]) == 0
    assert "Best colocated" in capsys.readouterr().out
    recipe = read_recipe(path)
    assert set(recipe.placement.models) == {"actor", "critic", "reference"}
    assert 1 <= recipe.placement.num_ranks_in_all <= 2
    assert len(run_of(recipe, two)) == 1
    assert main(["map", "--gpus", "2", "--out", str(path)]) == 1
    assert "expected --recipe too" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "rloo", "reinforce", "safe"])
def test_every_algorithm_has_a_mapping(algorithm):
    from hybridflow.mapping import search
    from hybridflow.training.from_mapping import describe_models, describe_workload, place_models
    from shared.topology import Cluster, Link
    from shared.topology.device import PRESETS

    recipe = read_recipe(f"{algorithm}-sort", {"beta": "0" if algorithm == "remax" else "0.1"})
    link = Link.from_rate(1e9, alpha_s=1e-5)
    cluster = Cluster.uniform(1, 4, PRESETS["A100_80"], local=link, network=link)
    models = describe_models(recipe)
    made = place_models(recipe, search(models, cluster, describe_workload(recipe)), "ray")
    assert set(made.placement.models) == {model.name for model in models}
    roles = {"ppo": {"critic"}, "safe": {"critic", "cost-critic"}}.get(algorithm, set())
    assert roles < set(made.placement.models)


def test_bench_tells_of_a_step_and_draws_it(tmp_path, capsys):
    sizes = ["--set", "batch_size=32"]
    assert main(["bench", "grpo-sort", *sizes, "--steps", "3", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "actor.generate" in told
    assert "generated tokens a second, after 2 steps that are not counted" in " ".join(told.split())
    found = json.loads((tmp_path / "bench.json").read_text())
    assert len(found["step_s"]) == len(found["method_s"]["actor.update"]) == 3
    parts = map(sum, zip(*found["method_s"].values(), strict=True))
    assert all(part < whole for part, whole in zip(parts, found["step_s"], strict=True))
    assert "actor.update" in (tmp_path / "timeline.svg").read_text()
    assert main(["bench", "grpo-sort", "--steps", "0"]) == 1


def test_what_can_not_be_mapped_is_told_before_the_search(tmp_path, capsys):
    apart = ["placement.pools={a: 1, b: 1}", "placement.models={rollout: {pool: b}}"]
    changes = ["--set", "loop.kind=async", "placement.engine=local", *apart]
    assert main(["map", "--recipe", "ppo-sort", *changes, "--out", str(tmp_path / "x")]) == 1
    assert "set loop=null and server=null" in capsys.readouterr().err


def test_exports_want_no_rollout():
    places = {"pools": "{a: 1, b: 1}", "models": "{rollout: {pool: b}}", "engine": "local"}
    changes = {f"placement.{key}": value for key, value in places.items()}
    server = {"server": "{kind: vllm, url: 'http://nowhere:1', folder: x}"}
    recipe = read_recipe("grpo-sort", changes | server).without_rollout()
    assert not recipe.server.kind
    assert recipe.placement.of("rollout").pool == "a"
    assert recipe.placement.pools == {"a": 1, "b": 1}


def test_calls_whose_answers_waited_are_drawn_one_after_another():
    read_late = [
        Span(1, "a.x", 0, 0.0, 1.0),
        Span(2, "b.y", 0, 0.5, 1.5),
        Span(1, "a.x", 1, 0.2, 1.0),
    ]
    assert sorted(cut_overlaps(read_late)) == [
        Span(1, "a.x", 0, 0.0, 0.5), Span(1, "a.x", 1, 0.2, 1.0), Span(2, "b.y", 0, 0.5, 1.5),
    ]  # fmt: skip
