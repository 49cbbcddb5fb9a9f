"""The scripts and blocks that users start from run as they are, ranks and spares included."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
EXAMPLES = sorted((HOME / "examples").glob("*.py"))


OPTIONS = ("-n", "2", "--spares", "1")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(driver, path, tmp_path):
    told = re.search(r"^meshyard-swift run (.*) \S+\.py", path.read_text(), re.MULTILINE)
    if told:
        assert driver.run(tmp_path, *told[1].split(), path)
        return
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, check=False, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert EXAMPLES


def test_the_readmes_script_trains(driver, tmp_path):
    (block,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "train.py"
    script.write_text(block)
    driver.run(tmp_path, *OPTIONS, script)
    assert list((tmp_path / "checkpoints").iterdir())
