"""The non-tensor values of a checkpoint, as one rank sees them.

Where ranks had different values, a rank looks up its own first, and then the others': a pipeline
stage's parameters may be on any rank when the layout changes.
"""

from __future__ import annotations

from typing import Any

from bytecheckpoint.state.values import decode_tree
from shared.errors import DataError

__all__ = ["SavedValues"]


class SavedValues:
    """The saved trees, by path."""

    def __init__(self, extra: dict[str, Any], rank: int) -> None:
        """Takes the content of `extra.json`.

        Raises:
            DataError: the content has another form.
        """
        tree, by_rank = extra.get("tree"), extra.get("ranks", {})
        if not isinstance(by_rank, dict) or not all(isinstance(v, list) for v in by_rank.values()):
            raise DataError("extra values: expected lists by rank; the checkpoint is damaged")
        self._by_rank: dict[str, list[Any]] = by_rank
        self._rank = rank
        self.root = [self._take_own("", tree)]

    def child(self, path: str, nodes: list[Any], key: Any) -> list[Any]:
        """The candidates for the value under a key.

        Args:
            path: path of the child.
            nodes: candidates for the parent, the preferred first.
            key: key of a dictionary, or position in a list.
        """
        found = []
        for node in nodes:
            items = _list_items(node)
            if key in items:
                found.append(items[key])
        return self._put_own_first(path, found)

    def keys(self, nodes: list[Any]) -> list[Any]:
        """All keys that any candidate has."""
        return list(dict.fromkeys(key for node in nodes for key in _list_items(node)))

    def of_ranks(self, path: str) -> list[Any]:
        """Each saved rank's value at a path that differs by rank."""
        return self._by_rank.get(path, [])

    def _take_own(self, path: str, tree: Any) -> Any:
        """The coordinator's tree with this rank's values where ranks had different ones.

        An object with `load_state_dict` gets its tree as a whole.
        """
        own = self._by_rank.get(path, [])[self._rank : self._rank + 1]
        if own and own[0] is not None and tree != {"$ranks": None}:
            return own[0]
        if isinstance(tree, list):
            return [self._take_own(_join(path, at), item) for at, item in enumerate(tree)]
        if isinstance(tree, dict) and not any(key.startswith("$") for key in tree):
            return {key: self._take_own(_join(path, key), item) for key, item in tree.items()}
        return tree

    def _put_own_first(self, path: str, nodes: list[Any]) -> list[Any]:
        values = self._by_rank.get(path)
        if values is None:
            return nodes
        own = values[self._rank : self._rank + 1]
        return [value for value in (*own, *values) if value is not None]


def _list_items(node: Any) -> dict[Any, Any]:
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return {}
    if len(node) == 1:
        ((kind, content),) = node.items()
        if kind == "$dict":
            return {decode_tree(key, _refuse_tensor): value for key, value in content}
        if kind == "$tuple":
            return dict(enumerate(content))
        if kind == "$as":
            return _list_items(content[1])
        if kind in ("$module", "$optimizer"):
            return content
        if kind.startswith("$"):
            return {}
    return node


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _refuse_tensor(name: str) -> Any:
    raise DataError(f"a dictionary's key cannot be the tensor {name!r}")
