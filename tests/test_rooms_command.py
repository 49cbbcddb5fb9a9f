"""Tracked files that nothing names are found, and `tools/rooms.py` prints all there is."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rules.checks import check_tracked_files
from rules.package import tracked_files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def git(tmp_path):
    """Runs git in the planted tree, and skips where there is none."""
    if shutil.which("git") is None:
        pytest.skip("needs git: which files are tracked is what is checked")

    def run(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    run("init", "-q")
    return run


def refused(name, root):
    """Returns what rule 9 finds in a planted package."""
    return [str(v) for v in check_tracked_files(f"packages/{name}", tracked_files(root), root)]


def test_a_tracked_data_file_that_nothing_names(plant, git, tmp_path):
    package = plant({"run.py": 'FLIGHTS = "flights.csv"\nASSETS = "old_graph/"'})
    assets = package.folder / "tests/assets"
    (assets / "old_graph").mkdir(parents=True)
    for name in ("flights.csv", "nobody_reads_this.csv", "old_graph/0.bin", "stray_graph.npz"):
        (assets / name).touch()
    assert refused("tiny", tmp_path) == []
    git("add", "-A")
    found = refused("tiny", tmp_path)
    assert [text.split(": ")[1] for text in found] == [
        "packages/tiny/tests/assets/nobody_reads_this.csv",
        "packages/tiny/tests/assets/stray_graph.npz",
    ]
    # Another package that names the file does not read it.
    plant({"run.py": 'NAME = "nobody_reads_this.csv"'}, "two")
    git("add", "-A")
    assert len(refused("tiny", tmp_path)) == 2
    assert refused("two", tmp_path) == []


def test_a_source_folder_called_report(plant, git, tmp_path):
    plant({"report/__init__.py": "X = 1"})
    git("add", "-A", "-f")
    (found,) = refused("tiny", tmp_path)
    assert "src/tiny/report/__init__.py: git ignores a folder called report" in found


def test_without_git_no_list_of_tracked_files(tmp_path):
    assert tracked_files(tmp_path) is None


def test_the_command_prints_violations_and_a_table(plant, tmp_path):
    def rooms(*arguments):
        tool = [sys.executable, ROOT / "tools/rooms.py", "--root", tmp_path, *arguments]
        return subprocess.run(tool, check=False, capture_output=True, text=True)

    plant()
    done = rooms("tiny")
    assert done.returncode == 0, done.stderr
    assert "rule 9 is not checked" in done.stdout
    plant({"planner.py": "from tiny.runtime import run\nclass Plan: ...", "seat.py": "X = 1"})
    done = rooms()
    assert done.returncode == 1
    assert "rule 2: packages/tiny/src/tiny/planner.py:1: planner imports runtime" in done.stdout
    assert "rule 3: packages/tiny/src/tiny/seat.py: 'seat' in a file name" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("tiny ")]
    assert row.split() == ["tiny", "4", "2", "1", "2", "0", "0", "0", "2", "1", "0", "0", "0"]
    assert rooms("--rule", "0", "1").returncode == 0
    done = rooms("big")
    assert done.returncode == 2
    assert "expected packages among ['tiny'], got ['big']" in done.stderr
