"""Names that are registered from outside are accepted by recipes and shown by the command line."""

from dataclasses import replace

import pytest
import torch

import hybridflow as hy
from hybridflow.algorithms.dataflow import AlgorithmSpec
from hybridflow.algorithms.loops import OneStep
from hybridflow.algorithms.loops.loop_spec import LoopSpec
from hybridflow.algorithms.registry import ALGORITHMS, LOOPS
from hybridflow.cli import main
from hybridflow.mapping.models import LLAMA_SIZES
from hybridflow.mapping.steps import STEPS, StepKind
from hybridflow.rl import correction
from hybridflow.rl.registry import LEVELS
from hybridflow.rollout.servers.registry import SERVERS
from hybridflow.tasks.registry import TASKS
from hybridflow.training.config import read_recipe
from hybridflow.training.from_mapping import describe_workload
from hybridflow.training.placement import ENGINES, Loop, Server
from hybridflow.training.runtime import Run
from shared.errors import ConfigError


@pytest.fixture
def added():
    """Adds an entry to a registry, for one test."""
    entries = []

    def add(registry, name, entry):
        registry.add(name, entry, "of this test")
        entries.append((registry, name))

    yield add
    for registry, name in entries:
        registry.remove(name)


def shown_help(capsys, *command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


class Idle:
    """Draws, and learns nothing."""

    def __init__(self, inputs):
        self.actor, self.sampling = inputs.actor, inputs.sampling

    def rollout(self, prompts, step, generator=None):
        return (generator or self.actor).generate(prompts, self.sampling, step)

    def learn(self, roll):
        return {"reward": float(len(roll["tokens"]))}


def test_an_algorithm_from_outside_is_listed_and_trained_by(added, capsys):
    assert "idle" not in shown_help(capsys)
    with pytest.raises(ConfigError, match=r"algorithm: expected one of ppo, .*got 'idle'"):
        read_recipe("ppo-sort", {"algorithm": "idle"})
    added(ALGORITHMS, "idle", AlgorithmSpec(step="reinforce", build=Idle))
    assert "idle" in shown_help(capsys)
    recipe = read_recipe("ppo-sort", {"algorithm": "idle", "steps": "1", "batch_size": "8"})
    assert describe_workload(recipe).algorithm == "reinforce"
    with hy.Workers.inline() as workers:
        assert [told["reward"] for told in Run.set_up(recipe, workers).steps()] == [8.0]


def test_a_loop_from_outside_is_listed_and_trained_by(added, two, capsys):
    assert "twice" not in shown_help(capsys)
    seen = []

    def build(inputs):
        seen.append(inputs)
        return OneStep(
            algorithm=inputs.algorithm, rollout=inputs.rollouts[0], prompts=inputs.prompts
        )

    added(LOOPS, "twice", LoopSpec(build=build, has_eta=True))
    assert "twice" in shown_help(capsys)
    changes = {"loop.kind": "twice", "loop.eta": "3", "steps": "1", "batch_size": "8"}
    with pytest.raises(ConfigError, match="loop 'twice' needs a rollout with a pool"):
        read_recipe("grpo-sort", changes)
    places = {"engine": "local", "pools": "{a: 1, b: 1}", "models": "{rollout: {pool: b}}"}
    changes |= {f"placement.{name}": value for name, value in places.items()}
    run = Run.set_up(read_recipe("grpo-sort", changes), two)
    assert len(list(run.steps())) == 1
    assert [inputs.eta for inputs in seen] == [3]


def test_a_level_of_correction_from_outside_is_checked_and_used(added):
    ours = torch.tensor([[-1.0, -1.0]])
    theirs, mask = torch.tensor([[-2.0, -1.5]]), torch.tensor([[True, True]])
    for refused in (
        lambda: Loop(kind="one-step", correct="none"),
        lambda: correction.weights(ours, theirs, mask, level="none"),
    ):
        with pytest.raises(ConfigError, match="token, sequence, got 'none'"):
            refused()
    added(LEVELS, "none", torch.zeros_like)
    for level in LEVELS:
        assert Loop(kind="one-step", correct=level).correct == level
    assert correction.weights(ours, theirs, mask, level="none").tolist() == [[1.0, 1.0]]


def test_what_an_algorithm_from_outside_needs_is_checked(added):
    kind = StepKind(is_grouped=True, has_cost=True)
    added(STEPS, "both", kind)
    added(ALGORITHMS, "both", AlgorithmSpec(step="both", build=Idle, has_reference=False))
    changes = {"algorithm": "both", "num_samples": "1"}
    with pytest.raises(ConfigError, match="num_samples: both compares the responses"):
        read_recipe("ppo-sort", changes)
    changes["num_samples"] = "2"
    with pytest.raises(ConfigError, match="cost: both needs a cost"):
        read_recipe("ppo-sort", changes)
    with pytest.raises(ConfigError, match="cost: ppo has none, only safe-rlhf, both has"):
        read_recipe("ppo-sort", {"cost": "a.py:b"})
    with pytest.raises(ConfigError, match="beta: both has no KL penalty"):
        read_recipe("ppo-sort", {**changes, "cost": "a.py:b", "beta": "0.1"})


def test_a_kind_of_step_from_outside_is_mapped(added, capsys):
    arguments = ["map", "--gpus", "8", "--algorithm", "bare"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    added(STEPS, "bare", StepKind())
    assert "bare" in shown_help(capsys, "map")
    assert main(arguments) == 0
    assert "critic" not in capsys.readouterr().out


def test_a_size_from_outside_is_mapped(added, capsys):
    added(LLAMA_SIZES, "1B", (16, 2048, 32, 8, 8192))
    assert "1B" in shown_help(capsys, "map")
    assert main(["map", "--gpus", "8", "--actor", "1B", "--algorithm", "grpo"]) == 0


def test_a_task_from_outside_is_trained_on(added):
    changes = {"task": "reversed:2", "steps": "1", "batch_size": "8"}
    added(TASKS, "reversed", lambda number, seed: hy.tasks.DigitSort(k=number, seed=seed))
    recipe = read_recipe("ppo-sort", {**changes, "per_token": "true"})
    with hy.Workers.inline() as workers:
        run = Run.set_up(recipe, workers)
        assert run.task == hy.tasks.DigitSort(k=2)
        assert len(list(run.steps())) == 1
    missing = replace(recipe, task="sorted:2", per_token=False)
    with (
        hy.Workers.inline() as workers,
        pytest.raises(ConfigError, match=r"expected digit-sort:NUMBER, .*reversed:NUMBER, or a"),
    ):
        Run.set_up(missing, workers)


def test_an_engine_from_outside_starts_ranks(added, capsys):
    started = []

    def start(num_ranks, address):
        started.append((num_ranks, address))
        return hy.Workers.inline(num_ranks)

    added(ENGINES, "threads", start)
    assert "threads" in shown_help(capsys, "map")
    changes = ["placement.engine=threads", "steps=1", "batch_size=8"]
    assert main(["train", "ppo-sort", "--set", *changes]) == 0
    assert started == [(1, "")]


def test_a_server_from_outside_is_accepted(added):
    settings = {"kind": "mine", "url": "http://127.0.0.1:9", "folder": "weights"}
    with pytest.raises(ConfigError, match=r"server.kind: expected one of vllm, sglang, got 'mine'"):
        Server(**settings)
    added(SERVERS, "mine", "nowhere:Mine")
    assert Server(**settings).kind == "mine"
