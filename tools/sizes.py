"""Prints how large the code is: files, lines, the median file and the largest, part by part.

`python tools/sizes.py` also names files over 500 lines whose module docstring does not say why, and
base names that one part uses twice, since a reader who searches for one then finds the other.
`--check` exits with 1 when a file is too long without a reason.
"""

import argparse
import ast
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = ["main"]

LONGEST = 500
# Names that every folder may have: the roles of a package and what Python itself asks for.
ROLES = {"__init__.py", "__main__.py", "conftest.py", "reference.py", "cpu.py", "gpu.py"}


@dataclass(frozen=True, slots=True)
class Part:
    """The Python files of one part of the yard, with their lines."""

    name: str
    lines: dict[Path, int]


def parts(root: Path) -> list[Part]:
    """Returns source and tests of each package, then the yard's own folders."""
    folders = []
    for home in [root / "shared", *sorted(root.glob("packages/*"))]:
        folders += [home / "src", home / "tests"]
    folders += [root / name for name in ("tests", "bench", "tools")]
    found = []
    for folder in folders:
        lines = {
            path: len(path.read_text(encoding="utf-8").splitlines())
            for path in sorted(folder.rglob("*.py"))
            # Environments of benchmark peers are not our code.
            if not any(part.startswith(".") for part in path.relative_to(root).parts)
        }
        if lines:
            found.append(Part(str(folder.relative_to(root)), lines))
    return found


def too_long(part: Part) -> list[Path]:
    """Returns the files over the limit whose module docstring gives no reason."""
    found = []
    for path, count in part.lines.items():
        if count > LONGEST:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if "lines" not in docstring:
                found.append(path)
    return found


def repeated_names(part: Part) -> dict[str, list[Path]]:
    """Returns base names that more than one file of the part has, roles aside."""
    by_name = defaultdict(list)
    for path in part.lines:
        if path.name not in ROLES:
            by_name[path.name].append(path)
    return {name: paths for name, paths in by_name.items() if len(paths) > 1}


def row(name: str, lines: dict[Path, int]) -> str:
    """Writes one line of the table."""
    largest = max(lines, key=lambda path: lines[path])
    median = statistics.median(lines.values())
    return (
        f"{name:<28}{len(lines):>6}{sum(lines.values()):>8}{median:>8.0f}{lines[largest]:>8}  "
        f"{largest.name}"
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a file is too long")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    found = parts(root)
    print(f"{'part':<28}{'files':>6}{'lines':>8}{'median':>8}{'largest':>8}")
    for part in found:
        print(row(part.name, part.lines))
    print(row("all", {path: count for part in found for path, count in part.lines.items()}))
    for part in found:
        for name, paths in repeated_names(part).items():
            print(f"twice in {part.name}: {name}: {', '.join(str(p.parent.name) for p in paths)}")
    long = [path for part in found for path in too_long(part)]
    for path in long:
        print(
            f"{path.relative_to(root)}: over {LONGEST} lines; split it, or say in its module "
            "docstring why it has so many lines"
        )
    return 1 if arguments.check and long else 0


if __name__ == "__main__":
    sys.exit(main())
