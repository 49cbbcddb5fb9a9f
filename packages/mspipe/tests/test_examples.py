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


def losses_of(text):
    found = re.findall(r"epoch (\d+): loss ([\d.]+)", text)
    assert [int(index) for index, _ in found] == list(range(1, len(found) + 1))
    return [float(loss) for _, loss in found]


def test_training_on_own_events_learns(run):
    text = run("train_on_your_events.py")
    losses = losses_of(text)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    # Guessing gives 0.5; knowing each customer's quarter of the town gives about 0.77.
    assert float(re.search(r"TGN: ap ([\d.]+)", text)[1]) > 0.6
    assert "EdgeBank: has seen" in text


def test_training_reads_a_table(run):
    rows = [f"{at % 7},{7 + at % 5},{at},{at % 2}" for at in range(120)]
    Path("events.csv").write_text("\n".join(["src,dst,t,kind", *rows]) + "\n")
    assert len(losses_of(run("train_on_your_events.py", "events.csv", "--epochs", "1"))) == 1


@pytest.mark.slow
def test_memory_on_a_server_changes_no_result(run):
    command = [sys.executable, "-m", "mspipe", "serve-memory", "--bind", "127.0.0.1:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        place = re.search(r"tcp://[\d.]+:\d+", server.stdout.readline())[0]
        away = run("train_on_your_events.py", "--epochs", "1", "--place", place)
    finally:
        server.terminate()
        server.communicate()
    here = run("train_on_your_events.py", "--epochs", "1")
    kept = [line for line in here.splitlines() if line.startswith(("epoch", "TGN", "EdgeBank"))]
    assert len(kept) == 3
    assert set(kept) <= set(away.splitlines())


def test_a_resumed_run_ends_as_an_uninterrupted_one(run):
    whole = run("resume.py", "--checkpoint", "whole")
    first = run("resume.py", "--checkpoint", "parts", "--stop-after", "1")
    rest = run("resume.py", "--checkpoint", "parts")
    assert len(losses_of(whole)) == 3
    assert len(losses_of(first)) == 1
    assert rest == whole


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(run, tmp_path):
    alone = losses_of(run("train_on_workers.py"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "train_on_workers.py"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 workers, ")
    assert losses_of(done.stdout) == pytest.approx(alone, abs=1e-4)
    assert len(alone) == 2
