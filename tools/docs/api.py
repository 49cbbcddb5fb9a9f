"""Writes the API reference: what each package exports, what that returns, and modules that pages name.

A thing that has several public names is described once, at the first of: `shared`, a package's top
level, its modules by name; the other pages link to it. A named folder that exports nothing stands for
the modules in it. Classes of the package that nobody exports, but that something described returns,
follow on the package's own page.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

from docs.pages import find_pages
from rules.import_graph import find_home
from rules.package import Package

__all__ = ["find_named_modules", "find_returned", "read_exports", "write_api"]


def find_named_modules(packages: list[Package]) -> set[str]:
    """Returns the dotted names of modules that stand on a page or in a top-level docstring."""
    root = packages[0].root
    pages = [Path("README.md"), *(page for package in packages for page in find_pages(package))]
    texts = [(root / page).read_text(encoding="utf-8") for page in pages]
    texts += [ast.get_docstring(package.modules[package.name].tree) or "" for package in packages]
    modules = {name for package in packages for name in package.modules}
    named = set()
    for name in re.findall(r"\b\w+(?:\.\w+)+", "\n".join(texts)):
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        named |= {name} & modules
    return named - {package.name for package in packages}


def write_api(packages: list[Package], out: Path) -> None:
    """Imports the packages and writes a page for each and for each of its modules described."""
    named = find_named_modules(packages)
    for package in packages:
        top = importlib.import_module(package.name)
        named |= {value.__name__ for value in read_exports(top).values() if inspect.ismodule(value)}
    described: dict[object, str] = {}
    for package in sorted(packages, key=lambda package: package.name != "shared"):
        folder = out / package.folder.relative_to(package.root) / "api"
        folder.mkdir(parents=True)
        top = importlib.import_module(package.name)
        text = _describe(top, f"{package.name}: API", package, described)
        modules = _find_modules(named & set(package.modules))
        for module in modules:
            page = _describe(module, module.__name__, package, described)
            (folder / f"{module.__name__}.rst").write_text(page, encoding="utf-8")
        returned = find_returned(described, package.name)
        if returned:
            text += "\nReturned\n--------\n\n"
        for value in returned:
            described[value] = f"{value.__module__}.{value.__qualname__}"
            text += f".. autoclass:: {described[value]}\n   :members:\n\n"
        if modules:
            listed = "\n".join(f"   {module.__name__}" for module in modules)
            text += f"\nModules\n-------\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"
        (folder / "index.rst").write_text(text, encoding="utf-8")


def read_exports(module: ModuleType) -> dict[str, object]:
    """Returns what a module exports, by name."""
    names = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
    return {name: getattr(module, name) for name in names}


def find_returned(described: Iterable[object], package: str) -> list[type]:
    """Returns a package's other classes that what is described returns, and what these return."""
    known, found = set(described), []
    waiting = [value for value in known if _belongs(value, package)]
    while waiting:
        for function in _list_functions(waiting.pop()):
            for value in _read_result(function):
                if value not in known and _belongs(value, package):
                    known.add(value)
                    found.append(value)
                    waiting.append(value)
    return sorted(found, key=lambda value: value.__name__)


def _belongs(value: object, package: str) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == package


def _list_functions(value: object) -> Iterator[Callable]:
    """Yields a function, or a class's public methods and the getters of its public properties."""
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            function = getattr(member, "fget", getattr(member, "__func__", member))
            if inspect.isfunction(function) and not name.startswith("_"):
                yield function


def _read_result(function: Callable) -> Iterator[type]:
    """Yields the public classes in what a function is said to return."""
    try:
        waiting = [get_type_hints(function).get("return")]
    except (NameError, TypeError):  # a name that only type checkers import
        return
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if inspect.isclass(hint) and not get_args(hint) and not hint.__name__.startswith("_"):
            yield hint


def _find_modules(names: set[str]) -> list[ModuleType]:
    """Imports modules by name; in place of a folder that exports nothing, the modules in it."""
    found = {}
    for name in names:
        module = importlib.import_module(name)
        inner = pkgutil.iter_modules(getattr(module, "__path__", []))
        inside = (
            [] if read_exports(module) else [i.name for i in inner if not i.name.startswith("_")]
        )
        for path in [f"{name}.{inner}" for inner in inside] or [name]:
            found[path] = importlib.import_module(path)
    return [found[name] for name in sorted(found)]


def _describe(
    module: ModuleType, title: str, package: Package, described: dict[object, str]
) -> str:
    """A page on a module: its docstring, then each exported thing that no other page describes."""
    parts = [title, "=" * len(title), "", f".. automodule:: {module.__name__}", ""]
    elsewhere = []
    for name, value in read_exports(module).items():
        path = f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            elsewhere.append(f"- ``{name}`` is the module :py:mod:`{value.__name__}`")
        elif not callable(value):
            # Where it is assigned its docstring stands, for which a value has no room.
            home = find_home(module.__name__, name, package.modules)
            parts += [f".. autodata:: {home or module.__name__}.{name}", "   :no-value:", ""]
        elif inspect.isclass(value) and not any(
            _belongs(value, name) for name in (package.name, "shared")
        ):
            elsewhere.append(f"- ``{name}`` is ``{value.__module__}.{value.__qualname__}``")
        elif value in described:
            elsewhere.append(f"- ``{name}`` is :py:obj:`{described[value]}`")
        else:
            described[value] = path
            members = ["   :members:"] if inspect.isclass(value) else []
            kind = "class" if members else "function"
            parts += [f".. auto{kind}:: {path}", *members, ""]
    heading = ["Described elsewhere", "-------------------", ""] if elsewhere else []
    return "\n".join([*parts, *heading, *elsewhere, ""])
