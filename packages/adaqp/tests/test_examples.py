"""The scripts of examples/ run as their users start them, and print results that make sense."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


def launch(tmp_path, *command):
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(text):
    return re.findall(r"^epoch (\d+): loss ([\d.]+)$", text, re.MULTILINE)


def test_a_resumed_run_repeats_the_losses_of_an_uninterrupted_one(run):
    whole = losses_of(run("resume.py", "--folder", "whole"))
    first = losses_of(run("resume.py", "--folder", "parts", "--stop-at", "4"))
    rest = losses_of(run("resume.py", "--folder", "parts"))
    assert [int(epoch) for epoch, _ in whole] == list(range(1, 11))
    assert len(first) == 4
    assert first + rest == whole
    assert float(whole[-1][1]) < float(whole[0][1])


@pytest.mark.slow
def test_adaptive_messages_send_less_and_learn_as_much(tmp_path):
    text = launch(tmp_path, EXAMPLES / "train_on_your_graph.py")
    found = re.findall(r"^(\w+): test accuracy ([\d.]+), ([\d.]+) MB sent$", text, re.MULTILINE)
    assert [name for name, *_ in found] == ["exact", "adaptive"]
    (_, exact, exact_mb), (_, adaptive, adaptive_mb) = found
    # Five classes: guessing gives 0.2.
    assert float(exact) > 0.8
    assert float(adaptive) > float(exact) - 0.05
    assert float(adaptive_mb) < float(exact_mb)


@pytest.mark.slow
def test_a_graph_of_ones_own_is_learnt(tmp_path):
    """Two communities, whose features hardly tell them apart and whose neighbours do."""
    draw = np.random.default_rng(0)
    label = np.arange(240) % 2
    src = draw.integers(0, 240, 3_000)
    dst = (src + 2 * draw.integers(1, 120, 3_000)) % 240  # of the same parity
    role = draw.integers(0, 3, 240)
    np.savez(
        tmp_path / "graph.npz",
        src=np.concatenate([src, dst]),
        dst=np.concatenate([dst, src]),
        feat=(label[:, None] + 3 * draw.standard_normal((240, 4))).astype(np.float32),
        label=label,
        train_mask=role == 0,
        val_mask=role == 1,
        test_mask=role == 2,
    )
    text = launch(tmp_path, EXAMPLES / "train_on_your_graph.py", "graph.npz", "--epochs", "15")
    found = re.findall(r"^(\w+): test accuracy ([\d.]+)", text, re.MULTILINE)
    assert [name for name, _ in found] == ["exact", "adaptive"]
    assert min(float(accuracy) for _, accuracy in found) > 0.8


@pytest.mark.slow
def test_two_ranks_train_one_model(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = launch(tmp_path, *torchrun, EXAMPLES / "train_on_ranks.py")
    first, last = re.search(r"^loss ([\d.]+) to ([\d.]+)$", text, re.MULTILINE).groups()
    assert float(last) < float(first)
    assert float(re.search(r"^test accuracy ([\d.]+)$", text, re.MULTILINE)[1]) > 0.5
    assert "1000 nodes predicted, 5 classes" in text
    sent = re.findall(r"^rank (\d): ([\d.]+) MB sent$", text, re.MULTILINE)
    assert [rank for rank, _ in sent] == ["0", "1"]
    assert all(float(megabytes) > 0 for _, megabytes in sent)
    shares = [float(share) for share in re.findall(r"bits: ([\d.]+)", text)]
    assert shares
    assert all(0 < share <= 1 for share in shares)
