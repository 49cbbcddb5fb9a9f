"""Prints where the packages break the rules of the house: rooms, circles, names, privates, files.

`python tools/rooms.py` checks all packages, `python tools/rooms.py adaqp` one of them. Each line
names a rule, a file with its line and what is wrong; a table of the packages follows. The rules:

0  no room has the name of an exported function or class
1  at most 12 entries at a package's top level, at most 12 files a folder, one word for each role
2  no rooms import each other in a circle, neither inside functions nor for types
3  a public class name exists once in a package, and means one role across packages; file names are
   nouns that a stranger would search for
8  nobody touches the privates of another of our objects
9  no tracked data file that neither code nor page names, no source folder called `report`

It exits with 1 when a rule is broken.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from import_graph import Circle, Import, Module, find_circles, read_imports, read_modules
from privates import FOREIGN, find_private_accesses
from room_names import EXPORTED_CLASHES, REFUSED, ROLES, SAME_ROLE

__all__ = ["Package", "Violation", "find_packages", "main"]

MOST_ENTRIES = 12
NOT_COUNTED = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
# What a reader or a tool reads by itself; everything else that git tracks is data.
NO_DATA = {".py", ".md", ".toml", ".yaml", ".yml", ".typed", ".cpp", ".cu", ".ini"}
# Folders that hold any file, so that naming one of them in the code names no file.
ANY_FILE = {"src", "tests", "docs", "assets", "results", "examples"}


@dataclass(frozen=True, order=True)
class Violation:
    """A broken rule, and where."""

    rule: int
    place: str
    text: str

    def __str__(self) -> str:
        return f"rule {self.rule}: {self.place}: {self.text}"


@dataclass(frozen=True)
class Package:
    """A distribution of the yard: its folder, and the folder that is imported under its name."""

    name: str
    folder: Path
    home: Path
    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Its modules by dotted name."""
        return read_modules(self.home)

    @cached_property
    def imports(self) -> list[Import]:
        """The imports between its modules."""
        return read_imports(self.modules)

    @cached_property
    def circles(self) -> list[Circle]:
        """Its rooms that import each other in a circle, folder by folder."""
        return find_circles(self.modules, self.imports)

    @cached_property
    def entries(self) -> list[str]:
        """The names at its top level, those of `NOT_COUNTED` left out."""
        return _entries(self.home)

    @cached_property
    def exported(self) -> set[str]:
        """The names in `__all__` of its `__init__`."""
        return _all_names(self.modules[self.name])

    def at(self, path: Path, line: int | None = None) -> str:
        """Writes a path relative to the root, with a line."""
        place = str(path.relative_to(self.root))
        return place if line is None else f"{place}:{line}"


def find_packages(root: Path) -> list[Package]:
    """Returns `shared` and the packages under a root, by name."""
    inits = [*root.glob("shared/src/*/__init__.py"), *root.glob("packages/*/src/*/__init__.py")]
    return sorted(
        (Package(i.parent.name, i.parents[2], i.parent, root) for i in inits),
        key=lambda package: package.name,
    )


def check_room_names(package: Package) -> Iterator[Violation]:
    """Rule 0: yields the rooms that importing them would put in the place of an exported name."""
    for module in package.modules.values():
        if module.is_folder:
            for name in sorted(_all_names(module)):
                room = package.modules.get(f"{module.name}.{name}")
                source = module.re_exports.get(name)
                if room and source and source != (module.name, name):
                    yield Violation(
                        0,
                        package.at(room.path),
                        f"has the name of {'.'.join(source)}, which {module.name} exports",
                    )


def check_entries(package: Package) -> Iterator[Violation]:
    """Rule 1: yields crowded folders, and top-level entries with a second word for a role."""
    if len(package.entries) > MOST_ENTRIES:
        yield Violation(
            1,
            package.at(package.home),
            f"expected at most {MOST_ENTRIES} entries at the top level, got {len(package.entries)}",
        )
    for folder in (m.path.parent for m in package.modules.values() if m.is_folder):
        count = sum(path.name not in NOT_COUNTED for path in folder.glob("*.py"))
        if count > MOST_ENTRIES and folder != package.home:
            yield Violation(
                1, package.at(folder), f"expected at most {MOST_ENTRIES} files, got {count}"
            )
    for entry in package.entries:
        role = ROLES.get(entry.removesuffix(".py"))
        if role:
            yield Violation(1, package.at(package.home / entry), f"expected the name {role!r}")


def check_circles(package: Package) -> Iterator[Violation]:
    """Rule 2: yields one line for each pair of rooms in a circle."""
    for circle in package.circles:
        names = ", ".join(circle.rooms)
        for source, target, each in circle.imports:
            yield Violation(
                2,
                package.at(package.modules[each.source].path, each.line),
                f"{source} imports {target}, in the circle of {circle.folder}: {names}",
            )


def read_class_names(package: Package) -> dict[str, list[tuple[Module, int]]]:
    """Returns where each public class of a package stands, classes inside others left out."""
    found = defaultdict(list)
    for module in package.modules.values():
        for node in _module_level(module.tree.body):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                # A class that depends on what is installed is defined once a branch.
                if module not in [other for other, _ in found[node.name]]:
                    found[node.name].append((module, node.lineno))
    return found


def check_class_names(packages: list[Package]) -> Iterator[tuple[str, Violation]]:
    """Rule 3: yields package and violation for a class name that is used twice."""
    homes = defaultdict(list)
    for package in packages:
        for name, places in read_class_names(package).items():
            written = [package.at(module.path, line) for module, line in places]
            homes[name].append((package.name, written[0]))
            for place in written[1:]:
                yield package.name, Violation(3, place, f"class {name} stands in {written[0]} too")
    for name, users in homes.items():
        if len(users) > 1 and name not in SAME_ROLE and name not in EXPORTED_CLASHES:
            for user, place in users:
                others = ", ".join(other for _, other in users if other != place)
                yield (
                    user,
                    Violation(3, place, f"class {name}, of a role not agreed, is also in {others}"),
                )


def check_file_names(package: Package) -> Iterator[Violation]:
    """Rule 3: yields the source files and folders with a word that nobody would search for."""
    for module in package.modules.values():
        name = module.name.rpartition(".")[2]
        for word in sorted(REFUSED.intersection(name.split("_"))):
            yield Violation(3, package.at(module.path), f"{word!r} in a file name says nothing")


def check_privates(files: Iterable[Path], root: Path, ours: set[str]) -> Iterator[Violation]:
    """Rule 8: yields the accesses to private names of our objects from elsewhere."""
    for path in files:
        for access in find_private_accesses(path, _dotted_name(path), ours):
            if access.foreign is None:
                place = f"{path.relative_to(root)}:{access.line}"
                yield Violation(8, place, f"{access.name} is private")


def python_files(root: Path, *folders: str) -> list[Path]:
    """Returns the Python files of folders, hidden ones left out."""
    return sorted(
        path
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def tracked_files(root: Path) -> list[str] | None:
    """Returns the paths that git tracks below a root; None without git or a checkout."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def check_tracked_files(folder: str, tracked: list[str], root: Path) -> Iterator[Violation]:
    """Rule 9: yields data files below a folder that nothing names, and folders called `report`."""
    inside = [Path(name) for name in tracked if name.startswith(folder + "/")]
    for path in inside:
        if "report" in path.parts[:-1] and path.suffix == ".py":
            yield Violation(9, str(path), "git ignores a folder called report: rename it")
    data = [path for path in inside if path.suffix not in NO_DATA and path.name != "LICENSE"]
    if not data:
        return
    # The package's own files may name it, and those of the yard, but no other package's.
    readers = [
        name
        for name in tracked
        if Path(name).suffix in NO_DATA and (name.startswith(folder + "/") or "/src/" not in name)
    ]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in readers)
    for path in data:
        folders = [part for part in path.relative_to(folder).parts[:-1] if part not in ANY_FILE]
        named = re.search(rf"(?<![\w.-]){re.escape(path.name)}(?![\w-])", text) or any(
            re.search(rf"""["'/]{re.escape(name)}["'/]""", text) for name in folders
        )
        if not named:
            yield Violation(9, str(path), "no code and no page names this file: remove it")


def check_package(package: Package, tracked: list[str] | None, ours: set[str]) -> list[Violation]:
    """Returns what breaks the rules within one package."""
    root, folder = package.root, str(package.folder.relative_to(package.root))
    files = python_files(root, folder, f"bench/{package.name}")
    return sorted(
        [
            *check_room_names(package),
            *check_entries(package),
            *check_circles(package),
            *check_file_names(package),
            *check_privates(files, root, ours),
            *(check_tracked_files(folder, tracked, root) if tracked is not None else ()),
        ]
    )


def our_names(packages: list[Package], root: Path) -> set[str]:
    """Returns the first parts of the dotted names of all our modules."""
    return {
        *(package.name for package in packages),
        *(path.stem for path in python_files(root, "bench", "tools", "tests")),
    }


def _entries(folder: Path) -> list[str]:
    """Returns the names in a folder; one that holds nothing but bytecode is not there for git."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in NOT_COUNTED
        and not path.name.startswith(".")
        and (path.is_file() or any(p.is_file() and p.suffix != ".pyc" for p in path.rglob("*")))
    )


def _all_names(module: Module) -> set[str]:
    """Returns the strings of a module's `__all__`."""
    return {
        constant.value
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, those in branches too, those in functions not."""
    for node in body:
        yield node
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _module_level(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _module_level(handler.body)


def _dotted_name(path: Path) -> str:
    """Returns a file's dotted name below a source folder, its stem elsewhere."""
    parts = path.with_suffix("").parts
    if "src" not in parts or "tests" in parts:
        return path.stem
    return ".".join(parts[len(parts) - parts[::-1].index("src") :])


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
        print("rule 9 is not checked: needs git and a clone")
    ours = our_names(packages, root)
    found = {}
    for package in packages:
        if not arguments.package or package.name in arguments.package:
            found[package.name] = check_package(package, tracked, ours)
    for name, violation in check_class_names(packages):
        if name in found:
            found[name].append(violation)
    if not arguments.package:
        benches = [path for path in (root / "bench").glob("*") if path.name not in names]
        yard = [path for path in benches if path.suffix == ".py"]
        yard += python_files(root, "tests", "tools", *(f"bench/{p.name}" for p in benches))
        found["(yard)"] = sorted(check_privates(yard, root, ours))
        if tracked is not None:
            found["(yard)"] += check_tracked_files("tests", tracked, root)
    rules = arguments.rule or [0, 1, 2, 3, 8, 9]
    for violations in found.values():
        for violation in violations:
            if violation.rule in rules:
                print(violation)
    columns = "".join(f"{f'rule {rule}':>8}" for rule in rules)
    print(f"\n{'package':<16}{'entries':>8}{'largest':>8}{'circles':>8}{'in them':>8}{columns}")
    for package in packages:
        if package.name in found:
            print(_row(package, found[package.name], rules))
    if "(yard)" in found:
        print(f"{'(yard)':<16}{'':>32}{_counts(found['(yard)'], rules)}")
    print("entries: at the top level; largest: files in the largest folder below it;")
    print("circles: groups of rooms that import each other, in them: rooms in these groups")
    return 1 if any(v.rule in rules for violations in found.values() for v in violations) else 0


def _row(package: Package, violations: list[Violation], rules: list[int]) -> str:
    """Writes a package's line of the table."""
    folders = [m.path.parent for m in package.modules.values() if m.is_folder]
    counts = [len(list(f.glob("*.py"))) - 1 for f in folders if f != package.home]
    numbers = [
        len(package.entries),
        max(counts, default=0),
        len(package.circles),
        sum(len(circle.rooms) for circle in package.circles),
    ]
    return f"{package.name:<16}{''.join(f'{n:>8}' for n in numbers)}{_counts(violations, rules)}"


def _counts(violations: list[Violation], rules: list[int]) -> str:
    return "".join(f"{sum(v.rule == rule for v in violations):>8}" for rule in rules)


if __name__ == "__main__":
    sys.exit(main())
