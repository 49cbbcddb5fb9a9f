"""The scripts and blocks that users start from run as they are, ranks and spares included."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
EXAMPLES = sorted((HOME / "examples").glob("*.py"))


def launch(path):
    """The command that the script's own first lines name."""
    needs_ranks = "meshyard-swift run" in path.read_text()
    run = ["-m", "swift", "run", "-n", "2", "--spares", "1"] if needs_ranks else []
    return [sys.executable, *run, str(path)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    done = subprocess.run(
        launch(path), cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert EXAMPLES


def test_the_readmes_script_trains(tmp_path):
    (block,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "train.py"
    script.write_text(block)
    command = [sys.executable, "-m", "swift", "run", "-n", "2", "--spares", "1", str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "checkpoints").iterdir())
