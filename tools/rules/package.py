"""Reads a package of the yard: its files, top-level entries, imports, exported names and classes."""

import ast
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rules.import_graph import (
    Circle,
    Import,
    Module,
    find_circles,
    find_home,
    read_imports,
    read_modules,
)

__all__ = [
    "NOT_COUNTED",
    "Package",
    "all_names",
    "find_packages",
    "is_command",
    "our_names",
    "python_files",
    "read_class_names",
    "read_words",
    "tracked_files",
    "yard_files",
]

# Names at a package's top level that are no rooms.
NOT_COUNTED = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}


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
    def exported(self) -> dict[str, str | None]:
        """The names that users import, and the module of each: those of a folder for `shared`."""
        faces = [m for m in self.modules.values() if m.is_folder]
        if self.name != "shared":
            faces = [self.modules[self.name]]
        return {
            name: find_home(face.name, name, self.modules)
            for face in faces
            for name in all_names(face)
        }

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


def read_class_names(package: Package) -> dict[str, list[tuple[Module, int]]]:
    """Returns where each public class of a package stands, the exported one first, commands last."""
    found = defaultdict(list)
    for module in package.modules.values():
        for node in _module_level(module.tree.body):
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            # A class that depends on what is installed is defined once a branch.
            if is_public and module not in [other for other, _ in found[node.name]]:
                found[node.name].append((module, node.lineno))
    for name, places in found.items():
        home = package.exported.get(name)
        places.sort(key=lambda place: (place[0].name != home, is_command(place[0])))
    return found


def is_command(module: Module) -> bool:
    """Says whether a module belongs to the command line."""
    return module.name.split(".")[1:2] == ["cli"]


def python_files(root: Path, *folders: str) -> list[Path]:
    """Returns the Python files of folders, hidden ones left out."""
    return sorted(
        path
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def yard_files(root: Path, packages: list[Package]) -> list[Path]:
    """Returns the Python files that belong to no package: benchmarks of one belong to it."""
    theirs = [root / "bench" / package.name for package in packages]
    found = python_files(root, "bench", "tests", "tools")
    return [path for path in found if not any(path.is_relative_to(home) for home in theirs)]


def tracked_files(root: Path) -> list[str] | None:
    """Returns the paths that git tracks below a root; None without git or a checkout."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def our_names(packages: list[Package], root: Path) -> frozenset[str]:
    """Returns the first parts of the dotted names of all our modules."""
    return frozenset(
        {
            *(package.name for package in packages),
            *(path.stem for path in python_files(root, "bench", "tools", "tests")),
        }
    )


def _entries(folder: Path) -> list[str]:
    """Returns the names in a folder; one that holds nothing but bytecode is not there for git."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in NOT_COUNTED
        and not path.name.startswith(".")
        and (path.is_file() or any(p.is_file() and p.suffix != ".pyc" for p in path.rglob("*")))
    )


def all_names(module: Module) -> set[str]:
    """Returns the strings of a module's `__all__`."""
    return {
        constant.value
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def read_words(text: str) -> list[str]:
    """Returns the words of a page outside code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split()


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, those in branches too, those in functions not."""
    for node in body:
        yield node
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _module_level(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _module_level(handler.body)
