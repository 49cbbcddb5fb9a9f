"""Finds accesses to private names of other objects: `other._name`, `from file import _name`.

A name that begins with one underscore is its class's own, or its file's. An object reaches its own
by `self`, `cls` and `super()`, and a file reaches those of the classes that stand in it. A file
that itself begins with an underscore belongs to its folder. Strings count too, where
`monkeypatch.setattr`, `patch`, `getattr` and their like take a name. Private names of other
projects stand in `FOREIGN`, with what they are needed for.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOREIGN", "Access", "find_private_accesses"]

# A dotted name covers what lies below it; one that begins with a dot is an attribute of any object.
FOREIGN = {
    "._asdict": "public methods and fields of a namedtuple, whose other names are the user's",
    "._fields": "as ._asdict",
    "._make": "as ._asdict",
    "._replace": "as ._asdict",
}

_OWN = ("self", "cls", "mcs")
# Functions that take an attribute's name, and the position of the name behind the object.
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "object", "__setattr__", "attrgetter"}


@dataclass(frozen=True, order=True)
class Access:
    """One access to a private name: file, line, and the name as the code has it."""

    path: Path
    line: int
    name: str
    foreign: str | None = None


def find_private_accesses(path: Path, module: str, ours: set[str]) -> Iterator[Access]:
    """Yields the accesses of a file to private names of other objects.

    Args:
        path: The Python file.
        module: Its dotted name, by which a private file of its own folder is known.
        ours: First parts of the dotted names of our own modules.

    Yields:
        Each access. `foreign` is the entry of `FOREIGN` that allows it, None where none does.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), path)
    bound = _bound_modules(tree)
    own = _own_names(tree)
    for node in ast.walk(tree):
        for name, is_import in _private_names(node, bound, own):
            head = name.split(".")[0]
            if is_import and head in ours and _is_private_file_of_the_folder(name, module):
                continue
            foreign = None if head in ours else _foreign(name)
            yield Access(path, node.lineno, name, foreign)


def _is_private(name: str) -> bool:
    return len(name) > 1 and name[0] == "_" and not name.startswith("__")


def _foreign(name: str) -> str | None:
    """Returns the entry of FOREIGN that covers a dotted name."""
    for entry in FOREIGN:
        if entry.startswith("."):
            if name.endswith(entry):
                return entry
        elif f"{name}.".startswith(f"{entry}."):
            return entry
    return None


def _is_private_file_of_the_folder(name: str, module: str) -> bool:
    """Says whether all that is private in an import are files of folders the module lies in."""
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if _is_private(part)]
    if len(private) != 1:
        return False
    folder = ".".join(parts[: private[0]])
    return module.startswith(folder + ".") and (private[0] < len(parts) - 1 or parts[-1] == "*")


def _bound_modules(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted name behind each name that an import binds."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _own_names(tree: ast.Module) -> set[str]:
    """Returns the private names that the file's classes define."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in _OWN:
                own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own.add(each.name)
                elif isinstance(each, ast.Assign):
                    own.update(t.id for t in each.targets if isinstance(t, ast.Name))
                    # Names in __slots__ among them.
                    own.update(
                        c.value
                        for c in ast.walk(each.value)
                        if isinstance(c, ast.Constant) and isinstance(c.value, str)
                    )
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    own.add(each.target.id)
    return {name for name in own if _is_private(name)}


def _dotted(node: ast.expr, bound: dict[str, str]) -> str:
    """Writes an expression as a dotted name, modules by their full names."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, bound)}.{node.attr}"
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    return "(...)"


def _private_names(
    node: ast.AST, bound: dict[str, str], own: set[str]
) -> Iterator[tuple[str, bool]]:
    """Yields the private names that one node reaches for, and whether it is an import."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in node.names:
            name = base + alias.name
            if any(_is_private(part) for part in name.split(".")):
                yield name, True
    elif isinstance(node, ast.Attribute):
        if _is_private(node.attr) and not _is_own(node.value, node.attr, bound, own):
            yield _dotted(node, bound), False
    elif isinstance(node, ast.Call):
        yield from ((name, False) for name in _names_in_strings(node, bound, own))


def _is_own(value: ast.expr, name: str, bound: dict[str, str], own: set[str]) -> bool:
    """Says whether `value.name` is a name of the object itself or of a class of this file."""
    if isinstance(value, ast.Name) and value.id in _OWN:
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "super":
            return True
        if value.func.id == "type" and value.args:
            return _is_own(value.args[0], name, bound, own)
    is_module = isinstance(value, ast.Name) and value.id in bound
    return name in own and not is_module


def _names_in_strings(call: ast.Call, bound: dict[str, str], own: set[str]) -> Iterator[str]:
    """Yields private names that a call takes as a string: getattr, setattr, patch and their like."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    function = call.func.id if isinstance(call.func, ast.Name) else function
    if function not in {"getattr", "setattr", "hasattr", "delattr", "__setattr__", "patch"} and not (
        isinstance(call.func, ast.Attribute) and _dotted(call.func, bound).endswith("patch.object")
    ):
        return
    texts = [a.value if isinstance(a, ast.Constant) else None for a in call.args[:2]]
    if texts and isinstance(texts[0], str) and "." in texts[0]:
        if any(_is_private(part) for part in texts[0].split(".")):
            yield texts[0]
    elif len(texts) == 2 and isinstance(texts[1], str) and _is_private(texts[1]):
        if not _is_own(call.args[0], texts[1], bound, own):
            yield f"{_dotted(call.args[0], bound)}.{texts[1]}"
