"""Which slow tests a change runs, in repositories planted for it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from touched import changed_files, main, touched_tests


def git(root, *command):
    subprocess.run(["git", "-C", root, *command], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A branch that left `base` after a first commit, which `base` has left as well."""
    git(tmp_path, "init", "--initial-branch", "base")
    git(tmp_path, "config", "user.name", "nobody")
    git(tmp_path, "config", "user.email", "nobody@example.org")

    def commit(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("changed")
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-m", "Change files")

    commit("packages/a/x.py", "packages/b/x.py", "shared/x.py", "tests/x.py")
    git(tmp_path, "checkout", "-b", "branch")
    git(tmp_path, "checkout", "base")
    commit("packages/b/only_on_base.py")
    git(tmp_path, "checkout", "branch")
    return tmp_path, commit


def test_files_changed_on_the_branch_in_the_work_tree_and_new_ones(repository):
    root, commit = repository
    assert changed_files("base", root) == []
    commit("packages/a/committed.py")
    (root / "shared/x.py").write_text("not committed")
    (root / "tests/new.py").write_text("not added")
    (root / ".gitignore").write_text("ignored.py\n")
    (root / "ignored.py").write_text("")
    assert sorted(changed_files("base", root)) == [
        ".gitignore",
        "packages/a/committed.py",
        "shared/x.py",
        "tests/new.py",
    ]


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        ([], []),
        (["packages/a/src/a/x.py", "packages/a/README.md"], ["packages/a"]),
        (["bench/a/bench_x.py"], ["packages/a"]),
        (["shared/src/shared/files.py", "bench/shared/bench_x.py"], ["shared"]),
        (["tools/rooms.py", "README.md"], ["tests"]),
        (["bench/run.py"], ["tests"]),
        (["bench/results/a-x.md"], []),
        (["packages/removed/x.py"], ["tests"]),
        (["packages/b/x.py", "shared/x.py", "packages/a/x.py"],
         ["packages/a", "packages/b", "shared"]),
    ],
)  # fmt: skip
def test_tests_of_what_has_changed(repository, files, folders):
    assert touched_tests(files, repository[0]) == folders


def test_a_base_that_is_no_commit_is_refused(capsys):
    assert main(["no-such-branch"]) == 2
    assert "no-such-branch" in capsys.readouterr().err
