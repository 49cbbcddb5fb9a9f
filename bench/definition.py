"""What a benchmark's file says of itself, read without running it.

A file `bench/<package>/bench_<name>.py` is one benchmark. Its module docstring says what is
measured; `REVISION = 2`, a whole number, says that what is measured has changed since the first
runs (1 when left out); `PEERS`, a list of literals, says with which settings each peer runs and why
these are the peer's best. What it imports decides whose versions a report lists.
"""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["Definition", "PeerSetting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetting:
    """One setting of a peer, and why it is the peer's best."""

    peer: str
    setting: str
    why: str


class Definition:
    """A benchmark's file.

    Args:
        path: the file; one that does not exist any more says nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tree(self) -> ast.Module:
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        return ast.parse(text, str(self.path))

    @property
    def about(self) -> str:
        """The module docstring."""
        return ast.get_docstring(self._tree) or ""

    @property
    def revision(self) -> int:
        """`REVISION` of the file, 1 when it has none."""
        found = self._literal("REVISION", 1)
        if type(found) is not int or found < 1:
            raise ValueError(
                f"{self.path}: REVISION: expected a whole number from 1, got {found!r}"
            )
        return found

    @property
    def peers(self) -> list[PeerSetting]:
        """`PEERS` of the file, empty when it has none."""
        rows = self._literal("PEERS", [])
        try:
            return [PeerSetting(**row) for row in rows]
        except TypeError as error:
            raise ValueError(
                f"{self.path}: PEERS: expected a list of dictionaries with peer, setting and why, "
                f"got {rows!r}"
            ) from error

    def imported_modules(self) -> set[str]:
        """Returns the top-level modules that the file imports, and files beside it in turn."""
        found: set[str] = set()
        seen: set[Path] = set()
        waiting: list[Definition] = [self]
        while waiting:
            one = waiting.pop()
            seen.add(one.path)
            for name in one._imports():
                beside = self.path.with_name(f"{name}.py")
                if not beside.is_file():
                    found.add(name)
                elif beside not in seen:
                    waiting.append(Definition(beside))
        return found

    def started_peers(self) -> set[str]:
        """Returns the peers of bench/peers that the file starts with the `peer` fixture."""
        return self._calls("peer")

    def _imports(self) -> set[str]:
        found = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
        found |= {name.partition(".")[0] for name in self._calls("importorskip")}
        return found

    def _calls(self, function: str) -> set[str]:
        """The literal first arguments of a function's calls, called by name or as an attribute."""
        found = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                if called == function:
                    found.add(str(node.args[0].value))
        return found

    def _literal(self, name: str, default: Any) -> Any:
        for node in self._tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == name for target in node.targets
            ):
                try:
                    return ast.literal_eval(node.value)
                except ValueError as error:
                    raise ValueError(
                        f"{self.path}: {name}: expected a literal, which can be read without "
                        "running the file"
                    ) from error
        return default
