"""The scripts of examples/ run as their users start them, and print results that make sense."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import adaqp

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder of its own and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def losses_of(text):
    return {
        int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", text)
    }


def accuracy_of(text):
    return float(re.search(r"test accuracy ([\d.]+)", text)[1])


def test_training_on_the_generated_graph_learns(run):
    text = run("train_on_your_graph.py")
    losses = losses_of(text)
    assert list(losses) == [10, 20, 30]
    assert losses[30] < losses[10]
    assert accuracy_of(text) > 0.8, "guessing one of five blocks gives 0.2"
    assert set(np.load("classes.npy")) <= set(range(5))


def test_training_on_a_file_of_ones_own(run):
    graph = adaqp.data.sbm(300, blocks=3, degree=6, feat=4, seed=1)
    names = ("src", "dst", "feat", "label", "train_mask", "val_mask", "test_mask")
    np.savez("graph.npz", **{name: getattr(graph, name).numpy() for name in names})
    text = run("train_on_your_graph.py", "graph.npz", "--epochs", "20")
    assert accuracy_of(text) > 0.6, "guessing one of three blocks gives 0.33"
    assert np.mean(np.load("classes.npy") == graph.label.numpy()) > 0.6


@pytest.mark.slow
def test_ranks_resume_and_send_less_after_an_assignment(tmp_path):
    def launch(*arguments):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *torchrun, EXAMPLES / "train_on_ranks.py", *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = launch("--epochs", "20", "--checkpoint", "whole")
    first = launch("--checkpoint", "parts-of-it")
    rest = launch("--epochs", "20", "--checkpoint", "parts-of-it")
    assert list(losses_of(whole)) == list(range(1, 21))
    assert losses_of(first) | losses_of(rest) == losses_of(whole), "equal to the last digit printed"
    assert accuracy_of(rest) == accuracy_of(whole) > 0.8
    assert re.search(r"^forward1 .*\d+% at [248] bits", rest, re.MULTILINE)
