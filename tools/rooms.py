"""Prints where the packages break the rules of the house: rooms, names, privates, files, docstrings.

`python tools/rooms.py` checks all packages, `python tools/rooms.py adaqp` one of them. Each line
names a rule, a file with its line and what is wrong; a table of the packages follows. The rules:

0  no room has the name of an exported function or class
1  at most 12 entries at a package's top level, at most 12 files a folder, one word for each role
2  no rooms import each other in a circle, neither inside functions nor for types
3  a public class name exists once in a package, and means one role across packages; file names are
   nouns that a stranger would search for
8  nobody touches the privates of another of our objects
9  no tracked data file that neither code nor page names, no source folder called `report`
10 errors that exported functions and classes raise stand under `Raises:` in their docstrings

It exits with 1 when a rule is broken.
"""

import argparse
import sys
from pathlib import Path

from rules.checks import (
    Violation,
    check_class_names,
    check_package,
    check_privates,
    check_tracked_files,
)
from rules.package import (
    Package,
    find_packages,
    our_names,
    read_words,
    tracked_files,
    yard_files,
)

__all__ = ["main"]

YARD = "(yard)"  # tests, tools and benchmarks that belong to no package


def find_violations(
    packages: list[Package], chosen: list[str], tracked: list[str] | None, root: Path
) -> dict[str, list[Violation]]:
    """Returns what breaks the rules, by package: in the chosen ones, or in all and the yard."""
    ours = our_names(packages, root)
    found = {
        package.name: check_package(package, tracked, ours)
        for package in packages
        if package.name in (chosen or [package.name])
    }
    # Which names are used twice is known when all packages are read.
    for name, violation in check_class_names(packages):
        if name in found:
            found[name].append(violation)
    if not chosen:
        found[YARD] = list(check_privates(yard_files(root, packages), root, ours))
        if tracked is not None:
            found[YARD] += check_tracked_files("tests", tracked, root)
    return {name: sorted(violations) for name, violations in found.items()}


def row(package: Package, violations: list[Violation], rules: list[int]) -> str:
    """Writes a package's line of the table."""
    folders = [m.path.parent for m in package.modules.values() if m.is_folder]
    readme = package.folder / "README.md"
    numbers = [
        len(package.entries),
        max((len(list(f.glob("*.py"))) - 1 for f in folders if f != package.home), default=0),
        len(package.circles),
        sum(len(circle.rooms) for circle in package.circles),
        len(read_words(readme.read_text(encoding="utf-8"))) if readme.exists() else 0,
    ]
    return f"{package.name:<16}{''.join(f'{n:>8}' for n in numbers)}{counts(violations, rules)}"


def counts(violations: list[Violation], rules: list[int]) -> str:
    """Writes how many violations there are of each rule."""
    return "".join(f"{sum(v.rule == rule for v in violations):>8}" for rule in rules)


def main(argv: list[str] | None = None) -> int:
    """Prints violations and the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", nargs="*", help="packages to check (default: all)")
    parser.add_argument("--rule", type=int, nargs="+", help="rules to print (default: all)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    packages = find_packages(root)
    names = [package.name for package in packages]
    unknown = sorted(set(arguments.package).difference(names))
    if unknown:
        parser.error(f"expected packages among {names}, got {unknown}")
    tracked = tracked_files(root)
    if tracked is None:
        print("rule 9 is not checked: it needs git and a clone")
    rules = arguments.rule or [0, 1, 2, 3, 8, 9, 10]
    found = find_violations(packages, arguments.package, tracked, root)
    shown = [v for violations in found.values() for v in violations if v.rule in rules]
    for violation in shown:
        print(violation)
    heads = ["entries", "largest", "circles", "in them", "words", *(f"rule {r}" for r in rules)]
    print(f"\n{'package':<16}{''.join(f'{head:>8}' for head in heads)}")
    for package in packages:
        if package.name in found:
            print(row(package, found[package.name], rules))
    if YARD in found:
        print(f"{YARD:<16}{'':>40}{counts(found[YARD], rules)}")
    print("entries: at the top level; largest: files of the largest folder below it;")
    print("circles: groups of rooms that import each other; in them: rooms in these groups;")
    print("words: of the README outside code; rule N: violations")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
