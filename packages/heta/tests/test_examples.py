import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
EXAMPLES = sorted((HOME / "examples").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(words, folder):
    done = subprocess.run(
        words,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.unchecked
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    words = ["--days", "8", "--epochs", "1"] if path.stem == "train_flights" else []
    # In this process, which has imported torch and PyG already.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_in_a_process_of_its_own(path, tmp_path):
    assert run([sys.executable, path], tmp_path)


def read_losses(text):
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", text)]


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_as_one_process(tmp_path):
    words = [HOME / "examples/train_flights.py", "--days", "8"]
    one = read_losses(run([sys.executable, *words], tmp_path))
    two = read_losses(run([*TORCHRUN, *words], tmp_path))
    assert len(one) == 2
    assert two == pytest.approx(one, abs=1.1e-4)


@pytest.mark.slow
def test_the_readmes_script_runs_under_torchrun(tmp_path):
    (script,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(script.splitlines()) <= 22
    (tmp_path / "train.py").write_text(script.replace('"late15"', '"late15", days=8'))
    assert "AUROC" in run([*TORCHRUN, "train.py"], tmp_path)


def test_there_are_examples():
    assert EXAMPLES
