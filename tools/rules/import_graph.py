"""Reads which files of a package import which, and finds the rooms that import each other in a circle.

The graph sees every import: at the top of a file, inside a function, under TYPE_CHECKING, and by
`import_module` where the name is spelt out. A name that is imported through the `__init__` of a
package or of a folder counts as an import of the file that defines it, so that no circle hides
behind a package's face. A room is a direct child of a folder, a file or a folder itself; a file
that imports from a room's `__init__` depends on that room too.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = [
    "Circle",
    "Import",
    "Module",
    "find_circles",
    "find_home",
    "read_imports",
    "read_modules",
]


@dataclass(frozen=True)
class Module:
    """A Python file under its dotted name; a folder goes by its `__init__`."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.path.read_text(encoding="utf-8"), self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def is_folder(self) -> bool:
        """Whether the module is a folder's `__init__`."""
        return self.path.name == "__init__.py"

    @cached_property
    def re_exports(self) -> dict[str, tuple[str, str]]:
        """For each name that a from-import of the file binds: the module it comes from, its name."""
        return {
            alias.asname or alias.name: (_base(self, node), alias.name)
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


@dataclass(frozen=True, order=True)
class Import:
    """One import: the importing module, the imported module, and the line."""

    source: str
    target: str
    line: int


@dataclass(frozen=True)
class Circle:
    """Rooms of one folder that import each other, with one import for each pair of rooms."""

    folder: str
    rooms: list[str]
    imports: list[tuple[str, str, Import]]


def read_modules(home: Path) -> dict[str, Module]:
    """Returns the modules under a package's source folder, by dotted name."""
    found = {}
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def read_imports(modules: dict[str, Module]) -> list[Import]:
    """Returns the imports between the modules of one package, its own `__init__` left out."""
    top = next(iter(modules)).split(".")[0]
    found = set()
    for module in modules.values():
        if module.name != top:
            for target, line in _targets(module, modules):
                if target not in (top, module.name):
                    found.add(Import(module.name, target, line))
    return sorted(found)


def find_circles(modules: dict[str, Module], imports: list[Import]) -> list[Circle]:
    """Returns the circles among the direct children of every folder.

    A folder's own `__init__` may import all of its children. It takes part in a circle only when
    one of these imports a name that the `__init__` itself defines.
    """
    found = []
    for folder in (name for name, module in modules.items() if module.is_folder):
        first = {}
        for each in imports:
            source, target = _room(each.source, folder), _room(each.target, folder)
            if source and target and source != target:
                first.setdefault((source, target), each)
        for rooms in _components(first):
            found.append(
                Circle(
                    folder,
                    sorted(rooms),
                    [(a, b, e) for (a, b), e in sorted(first.items()) if a in rooms and b in rooms],
                )
            )
    return found


def _room(name: str, folder: str) -> str | None:
    """Returns the child of the folder that a module lies in: `__init__` for the folder's own."""
    if name == folder:
        return "__init__"
    prefix = folder + "."
    return name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else None


def _base(module: Module, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that a from-import names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_folder]
    return ".".join([*parts, node.module] if node.module else parts)


def _nearest(name: str, modules: dict[str, Module]) -> str | None:
    """Returns the longest beginning of a dotted name that is a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def find_home(base: str, name: str, modules: dict[str, Module], depth: int = 8) -> str | None:
    """Returns the module that `from base import name` reaches in the end, None if not among them."""
    if f"{base}.{name}" in modules:
        return f"{base}.{name}"
    module = modules.get(base)
    if module and module.is_folder and name in module.re_exports and depth:
        return find_home(*module.re_exports[name], modules, depth - 1)
    return base if module else None


def _targets(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, int]]:
    """Yields each module of the package that a file imports, with the line."""
    bound = {}

    def through(base: str, name: str, line: int) -> Iterator[tuple[str, int]]:
        home = find_home(base, name, modules)
        if home:
            yield home, line
        # A room that is entered by its face is imported, whoever defines the name.
        if home and base in modules and not module.name.startswith(base + "."):
            yield base, line

    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                nearest = _nearest(alias.name, modules)
                if nearest:
                    yield nearest, node.lineno
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    bound[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                if f"{base}.{alias.name}" in modules:
                    bound[alias.asname or alias.name] = f"{base}.{alias.name}"
                yield from through(base, alias.name, node.lineno)

    def module_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = module_of(node.value)
            return f"{base}.{node.attr}" if f"{base}.{node.attr}" in modules else None
        return None

    calls_import_module = "import_module" in module.path.read_text(encoding="utf-8")
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            base = module_of(node.value)
            if base in modules and modules[base].is_folder:
                yield from through(base, node.attr, node.lineno)
        elif calls_import_module and isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A whole name, or the literal beginning of an f-string.
            name = node.value.split(":")[0].rstrip(".")
            if all(part.isidentifier() for part in name.split(".")):
                nearest = _nearest(name, modules)
                if nearest:
                    yield nearest, node.lineno


def _components(pairs: dict[tuple[str, str], Import]) -> list[set[str]]:
    """Returns the strongly connected components of more than one room."""
    onward = defaultdict(set)
    for source, target in pairs:
        onward[source].add(target)
    reached = {}
    for start in list(onward):
        seen, left = set(), [start]
        while left:
            for room in onward.get(left.pop(), ()):
                if room not in seen:
                    seen.add(room)
                    left.append(room)
        reached[start] = seen
    found = []
    for room in sorted(reached):
        together = {other for other in reached[room] if room in reached.get(other, ())}
        if room in together and together not in found:
            found.append(together)
    return found
