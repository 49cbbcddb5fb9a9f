"""The scripts of examples/ run as their users start them, and print results that make sense."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

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


def rounds_of(text):
    return re.findall(r"^round (\d+):.*AP ([\d.]+)", text, re.MULTILINE)


def test_training_on_own_events_learns(run):
    rounds = rounds_of(run("train_on_your_events.py"))
    assert [int(index) for index, _ in rounds] == [1, 2, 3, 4, 5, 6]
    # Guessing gives 0.5; knowing each customer's quarter of the town gives about 0.77.
    assert float(rounds[-1][1]) > 0.65


def test_training_reads_a_table(run):
    rows = [f"{at % 7},{7 + at % 5},{at * 3600}" for at in range(120)]
    Path("events.csv").write_text("\n".join(["src,dst,t", *rows]) + "\n")
    rounds = rounds_of(run("train_on_your_events.py", "events.csv", "--every", "1D"))
    assert len(rounds) >= 3
    assert all(0 <= float(ap) <= 1 for _, ap in rounds)


def test_a_resumed_run_ends_as_an_uninterrupted_one(run):
    whole = run("resume.py", "--checkpoint", "whole")
    first = run("resume.py", "--checkpoint", "parts", "--rounds", "2")
    rest = run("resume.py", "--checkpoint", "parts")
    assert len(rounds_of(whole)) == 6
    assert len(rounds_of(first)) == 2
    assert rest == whole


@pytest.mark.slow
def test_two_ranks_share_the_graph(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "train_on_ranks.py"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(rounds_of(done.stdout)) == 2
    ranks = re.findall(r"^rank (\d): (\d+) edges, ([\d.]+) MB sent$", done.stdout, re.MULTILINE)
    assert [rank for rank, _, _ in ranks] == ["0", "1"]
    edges = [int(count) for _, count, _ in ranks]
    # Events between the parts lie with both; a rank that has everything would have 1,200.
    assert max(edges) < 1_200 < sum(edges)
    assert all(float(sent) > 0 for *_, sent in ranks)
