"""The scripts of examples/ run as their users start them, and print results that make sense."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.cli import main as command

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
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def test_a_resumed_run_ends_as_an_uninterrupted_one(run):
    whole = losses_of(run("train_and_resume.py", "--folder", "whole"))
    first = run("train_and_resume.py", "--folder", "parts", "--steps", "25")
    rest = run("train_and_resume.py", "--folder", "parts")
    assert "starting after step 0\n" in first
    assert "starting after step 20\n" in rest, "step 25 was not saved, so its steps are repeated"
    assert list(whole) == [10, 20, 30, 40]
    assert losses_of(first) | losses_of(rest) == whole
    # A constant guess loses the targets' variance, about 0.6.
    assert max(whole.values()) < 0.15


def test_trains_on_a_table_of_ones_own(run):
    rows = [f"{at % 7},{at % 5},{at % 7 - at % 5}" for at in range(60)]
    Path("rows.csv").write_text("\n".join(["a,b,target", *rows]) + "\n")
    losses = losses_of(run("train_and_resume.py", "rows.csv", "--steps", "80"))
    assert losses[80] < losses[10] / 2


def test_fine_tuning_keeps_the_body_and_learns(run, capsys):
    text = run("fine_tune.py")
    assert f"loaded {4 * (6 * 32 + 32)} bytes" in text
    assert "left model.head.bias, model.head.weight" in text
    assert "body unchanged: True" in text
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 0.9
    assert command(["convert", "report/bytecheckpoint/tuned", "hub", "--to", "safetensors"]) == 0
    assert "accuracy" in run("fine_tune.py", "--base", "report/bytecheckpoint/tuned")


@pytest.mark.slow
def test_another_number_of_ranks_continues_the_training(tmp_path):
    def launch(num_ranks, *arguments):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(num_ranks), EXAMPLES / "train_on_ranks.py", *arguments),
            ],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = losses_of(launch(1, "--folder", "whole"))
    first, rest = launch(2, "--steps", "5"), launch(3)
    assert "2 ranks, starting after step 0\n" in first
    assert "3 ranks, starting after step 5\n" in rest
    found = losses_of(first) | losses_of(rest)
    assert list(whole) == list(found) == list(range(1, 11))
    # Sums of floats in another order differ in the last digits.
    assert found == pytest.approx(whole, abs=2e-4)
    assert whole[10] < whole[1]
