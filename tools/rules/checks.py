"""The rules: each check takes a package, or what it reads of it, and yields what breaks the rule."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rules.docstrings import find_raised_errors
from rules.names import EXPORTED_CLASHES, REFUSED, ROLES, SAME_ROLE
from rules.package import (
    NOT_COUNTED,
    Package,
    all_names,
    is_command,
    python_files,
    read_class_names,
)
from rules.privates import find_private_accesses

__all__ = [
    "Violation",
    "check_circles",
    "check_class_names",
    "check_entries",
    "check_file_names",
    "check_package",
    "check_privates",
    "check_raises",
    "check_room_names",
    "check_tracked_files",
    "unused_names",
]

MOST_ENTRIES = 12
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


def check_room_names(package: Package) -> Iterator[Violation]:
    """Rule 0: yields the rooms that importing them would put in the place of an exported name."""
    for module in package.modules.values():
        if module.is_folder:
            for name in sorted(all_names(module)):
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


def check_class_names(packages: list[Package]) -> Iterator[tuple[str, Violation]]:
    """Rule 3: yields package and violation for a class name that is used twice."""
    users = defaultdict(list)
    for package in packages:
        for name, places in read_class_names(package).items():
            first, *others = [package.at(module.path, line) for module, line in places]
            if package.name not in EXPORTED_CLASHES.get(name, ()):
                for place in others:
                    yield package.name, Violation(3, place, f"class {name} stands in {first} too")
            # A command's class has its name, which other packages' commands may have as well.
            if not is_command(places[0][0]):
                users[name].append((package, first))
    for name, found in users.items():
        if len(found) < 2 or name in SAME_ROLE:
            continue
        # One exported name stays, and the others make room for it.
        num_exported = sum(name in package.exported for package, _ in found)
        for package, place in found:
            is_listed = package.name in EXPORTED_CLASHES.get(name, ())
            if not is_listed and (num_exported > 1 or name not in package.exported):
                others = ", ".join(other for of, other in found if of is not package)
                text = f"class {name} is also in {others}: rename it, or agree on its role"
                yield package.name, Violation(3, place, text)


def unused_names(packages: list[Package]) -> list[str]:
    """Returns the class names listed as shared or as clashing that no longer are."""
    users = defaultdict(set)
    twice = set()
    for package in packages:
        for name, places in read_class_names(package).items():
            if any(not is_command(module) for module, _ in places):
                users[name].add(package.name)
            if len(places) > 1:
                twice.add(name)
    unused = [name for name in SAME_ROLE if len(users[name]) < 2]
    for name, meanings in EXPORTED_CLASHES.items():
        if not users[name].issuperset(meanings) or (len(users[name]) < 2 and name not in twice):
            unused.append(name)
    return sorted(unused)


def check_file_names(package: Package) -> Iterator[Violation]:
    """Rule 3: yields the source files and folders with a word that nobody would search for."""
    for module in package.modules.values():
        name = module.name.rpartition(".")[2]
        for word in sorted(REFUSED.intersection(name.split("_"))):
            yield Violation(3, package.at(module.path), f"{word!r} in a file name says nothing")


def check_privates(files: Iterable[Path], root: Path, ours: frozenset[str]) -> Iterator[Violation]:
    """Rule 8: yields the accesses to private names of our objects from elsewhere."""
    for path in files:
        for access in find_private_accesses(path, ours):
            if access.foreign is None:
                place = f"{path.relative_to(root)}:{access.line}"
                yield Violation(8, place, f"{access.name} is private")


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


def check_raises(package: Package) -> Iterator[Violation]:
    """Rule 10: yields the errors of exported names that no `Raises:` of theirs describes."""
    for place, function, error, is_described in find_raised_errors(package):
        if not is_described:
            yield Violation(10, place, f"{function} raises {error}: describe it under Raises")


def check_package(
    package: Package, tracked: list[str] | None, ours: frozenset[str]
) -> list[Violation]:
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
            *check_raises(package),
            *(check_tracked_files(folder, tracked, root) if tracked is not None else ()),
        ]
    )
