import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
EXAMPLES = HOME / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(words, folder):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_losses(text):
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]


def test_one_device_is_planned_and_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lower_one_device.py", "--steps", "5"])
    runpy.run_path(str(EXAMPLES / "lower_one_device.py"), run_name="__main__")
    losses = read_losses(capsys.readouterr().out)
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert (tmp_path / "report/qsync/one_device.json").exists()


@pytest.mark.slow
def test_two_ranks_train_and_their_traces_are_diagnosed(tmp_path):
    words = ["--length", "32", "--batch-size", "4", "--steps", "4", "--traces", "traces"]
    printed = run([*TORCHRUN, EXAMPLES / "train_unequal_ranks.py", *words], tmp_path)
    assert len(read_losses(printed)) == 4
    assert "rank 1" in printed
    told = run(
        ["-m", "qsync", "diagnose", "traces/rank0.json.gz", "traces/rank1.json.gz"], tmp_path
    )
    assert "on 2 ranks" in told


@pytest.mark.slow
def test_the_readmes_script_runs_under_torchrun(tmp_path):
    (script,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(script.splitlines()) <= 20
    (tmp_path / "train.py").write_text(script.replace("(10, seed", "(10, length=32, seed"))
    assert "rank 1" in run([*TORCHRUN, "train.py"], tmp_path)


@pytest.mark.slow
def test_the_trainer_takes_a_plan(tmp_path):
    printed = run([EXAMPLES / "train_with_trainer.py", "--steps", "3"], tmp_path)
    losses = read_losses(printed)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "operators" in printed


def test_there_are_two_or_three_examples():
    assert 2 <= len(list(EXAMPLES.glob("*.py"))) <= 3
