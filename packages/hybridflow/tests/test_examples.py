"""The complete scripts that a user would start from run, and do what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.unchecked  # whole trainings: checks of signatures would double their time


def rewards_of(told):
    return [float(reward) for reward in re.findall(r"^step .*reward ([\d.]+)", told, re.MULTILINE)]


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example in this process and in an empty folder; returns what it has printed."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_prompts_of_ones_own_are_learnt(example, tmp_path):
    rows = '{"prompt": "Digits:", "allowed": "0123456789"}\n{"prompt": "ab:", "allowed": "ab"}\n'
    (tmp_path / "prompts.jsonl").write_text(rows)
    told = example(
        "train_on_your_prompts.py", "--data", "prompts.jsonl", "--steps", "2", "--save", "kept"
    )
    assert len(rewards_of(told)) == 2
    assert (tmp_path / "kept/step-000002").is_dir()
    rewards = rewards_of(example("train_on_your_prompts.py", "--steps", "20"))
    assert len(rewards) == 20
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8


def test_interrupted_run_ends_with_the_same_numbers(example, tmp_path):
    whole = example("resume.py", "--folder", "whole")
    assert len(rewards_of(whole)) == 6
    first = example("resume.py", "--folder", "parts", "--stop-after", "2")
    second = example("resume.py", "--folder", "parts")
    assert "resumed from step 2\n" in second
    assert first + second.replace("resumed from step 2\n", "") == whole
    assert sorted(path.name for path in (tmp_path / "parts").glob("step-*")) == [
        "step-000004",
        "step-000006",
    ]


def is_trained_one_step_off(told):
    staleness = [int(number) for number in re.findall(r"staleness (\d+)", told)]
    return (
        len(rewards_of(told)) == 4
        and all(0 <= reward <= 1 for reward in rewards_of(told))
        and staleness[0] == 0
        and max(staleness) == 1
    )


def told_by(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone",
                                           "--nproc-per-node", "2"]], ids=["local", "torchrun"])  # fmt: skip
def test_one_pool_generates_while_the_other_trains(launcher, tmp_path):
    command = [sys.executable, *launcher, str(EXAMPLES / "two_pools.py")]
    assert is_trained_one_step_off(told_by(command, tmp_path))
