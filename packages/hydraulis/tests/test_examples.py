import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
QUICKLY = {"train_documents": ["--steps", "2", "--max-tokens", "512"]}


SLOW = {"train_documents"}  # the README's and the guide's blocks train too
CASES = [
    pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem)
    for path in EXAMPLES
]


@pytest.mark.parametrize("path", CASES)
def test_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path, *QUICKLY.get(path.stem, ())],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert EXAMPLES
