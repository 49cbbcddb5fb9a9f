"""Functions named on a command line are found, and names that lead nowhere are refused."""

import re
import sys

import pytest

from shared.cli.functions import load_function
from shared.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_job.py").write_text("VALUE = 7\n")
    (tmp_path / "small_job.py").write_text(
        "from beside_the_job import VALUE\n\ndef build():\n    return VALUE\n"
    )
    return tmp_path


def test_functions_of_files_and_modules_are_found(folder, monkeypatch):
    for name in ("small_job", "beside_the_job"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_function("small_job:build", "build", "a number")() == 7
    monkeypatch.chdir("/")
    assert load_function(f"{folder}/small_job.py:build", "build", "a number")() == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("small_job:nothing", "has no attribute 'nothing'"),
        ("nowhere:build", "No module named 'nowhere'"),
        ("nowhere.py:build", "No such file"),
        ("build", "Empty module name"),
    ],
)
def test_names_that_lead_nowhere_are_refused(folder, text, reason):
    message = rf"build: expected module:function .* returns a number, got '{text}' \(.*{reason}"
    with pytest.raises(ConfigError, match=message):
        load_function(text, "build", "a number")


def test_what_is_no_function_is_refused(folder):
    with pytest.raises(ConfigError, match=re.escape("got 'beside_the_job:VALUE', a int")):
        load_function("beside_the_job:VALUE", "build", "a number")
