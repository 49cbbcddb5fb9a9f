"""Finds the errors that exported functions and classes raise without a word in their docstrings."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from rules.package import Package, is_command

__all__ = ["Raised", "find_raised_errors"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# They tell of a mistake in our own code, answer `hasattr`, or end an iteration.
_NO_ERRORS = {"AssertionError", "AttributeError", "NotImplementedError", "StopIteration"}


class Raised(NamedTuple):
    """An error that a function raises itself, and whether its docstring says so."""

    place: str
    function: str
    error: str
    is_described: bool


def find_raised_errors(package: Package) -> Iterator[Raised]:
    """Yields what exported functions, and public and special methods of exported classes, raise.

    What special methods raise may stand in the docstring of their class, and what the setter of a
    property raises stands in its getter's. What a function passes on from others is not looked for.
    """
    for module in package.modules.values():
        for node in module.tree.body:
            if is_command(module) or getattr(node, "name", None) not in package.exported:
                continue
            for name, function, docstring in _read_functions(node):
                described = docstring.partition("Raises:")[2]
                for line, error in _find_raises(function):
                    place = package.at(module.path, line)
                    yield Raised(place, name, error, f"{error}:" in described)


def _read_functions(node: ast.stmt) -> Iterator[tuple[str, _Function, str]]:
    """Yields a function, or a class's methods, by name and with all that documents each."""
    if isinstance(node, _Function):
        yield node.name, node, ast.get_docstring(node) or ""
    elif isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, _Function)]
        for method in methods:
            is_special = method.name.startswith("__")
            if is_special or not method.name.startswith("_"):
                texts = [each for each in methods if each.name == method.name]
                texts += [node] if is_special else []
                docstring = "\n".join(ast.get_docstring(text) or "" for text in texts)
                yield f"{node.name}.{method.name}", method, docstring


def _find_raises(function: _Function) -> Iterator[tuple[int, str]]:
    """Yields line and class of each error in a function's own body; `raise error` names no class."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            error = ast.unparse(raised).rpartition(".")[2]
            if error[0].isupper() and error not in _NO_ERRORS:
                yield node.lineno, error
        waiting += ast.iter_child_nodes(node)
