"""Runs the slow tests of what has changed since a commit.

`python tools/touched.py BASE` finds the files that differ from the commit where this branch left
BASE, in the work tree as it is, new files included, and runs the tests marked `slow` or `netns` of the
packages that they belong to; `tests/` stands for whatever belongs to none. Slow tests of packages that
only build on what has changed (all of them, where that is `shared`) run with `hatch run test-all`.
What follows BASE goes to pytest.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["main", "touched_tests"]

ROOT = Path(__file__).parents[1]


def changed_files(base: str, root: Path) -> list[str]:
    """Returns the files that differ from where this branch left `base`, or are new.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """

    def lines(*command: str) -> list[str]:
        done = subprocess.run(
            ["git", *command], cwd=root, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    (fork,) = lines("merge-base", base, "HEAD")
    return lines("diff", "--name-only", fork) + lines("ls-files", "--others", "--exclude-standard")


def touched_tests(files: Iterable[str], root: Path) -> list[str]:
    """Returns the folders of tests that belong to changed files, sorted.

    Args:
        files: paths below `root`.
        root: the checkout.
    """
    found = set()
    for file in files:
        room, part, *_ = [*PurePosixPath(file).parts, ""]
        if (room, part) == ("bench", "results"):
            continue  # figures are tested in default runs
        if "shared" in (room, part):
            found.add("shared")
        elif room in ("packages", "bench") and (root / "packages" / part).is_dir():
            found.add(f"packages/{part}")
        else:
            found.add("tests")
    return sorted(folder for folder in found if (root / folder).is_dir())


def main(argv: list[str] | None = None) -> int:
    """Runs the tests and returns pytest's exit status, 0 where there are none."""
    parser = argparse.ArgumentParser(
        prog="hatch run test-touched", description=__doc__.split("\n")[0]
    )
    parser.add_argument("base", help="a commit or branch to compare with, as main or HEAD~3")
    arguments, options = parser.parse_known_args(argv)
    try:
        folders = touched_tests(changed_files(arguments.base, ROOT), ROOT)
    except subprocess.CalledProcessError as error:
        print(f"test-touched: {error.stderr.strip()}", file=sys.stderr)
        return 2
    if not folders:
        print(f"test-touched: nothing has changed since {arguments.base}")
        return 0
    print(f"test-touched: slow tests of {', '.join(folders)}", flush=True)
    command = ["-n", "2", "--dist", "loadfile", "-m", "slow or netns", *folders, *options]
    status = subprocess.run([sys.executable, "-m", "pytest", *command], cwd=ROOT, check=False)
    nothing_collected = 5
    return 0 if status.returncode == nothing_collected else status.returncode


if __name__ == "__main__":
    sys.exit(main())
