import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unchecked  # a model is trained, and many plans are looked at

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SLOW = {
    "train_under_a_limit",
    "what_fits",
}  # blocks of the README and the guide do the same in small


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(one, id=one.stem, marks=[pytest.mark.slow] if one.stem in SLOW else [])
        for one in EXAMPLES
    ],
)
def test_example_runs(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_examples():
    assert EXAMPLES
