import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert EXAMPLES
