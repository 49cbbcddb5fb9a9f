"""Converts between a checkpoint's tree of values and nested or flat values of other formats.

The tree (see `bytecheckpoint.state.values`) has modules and optimizers as leaves of their own, whose
tensors it does not mention. Expanded, they become what torch calls their state: parameters by name,
and "state" and "param_groups". DCP calls every value by its path joined with dots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bytecheckpoint.state.values import decode_tree, encode_dict, encode_leaf
from shared.errors import DataError

__all__ = ["Flat", "Path", "at_path", "encode", "expand", "flatten", "nest"]

Path = tuple[str | int, ...]


class Flat(NamedTuple):
    """A tree by flat names.

    Attributes:
        values: everything that is no tensor.
        tensors: names in the checkpoint, by flat name.
        paths: where values and tensors stand; numbers are places in lists.
    """

    values: dict[str, Any]
    tensors: dict[str, str]
    paths: dict[str, Path]


def encode(value: Any, path: str, leaf: Callable[[Any, str], Any] = encode_leaf) -> Any:
    """Encodes a nested value as a tree.

    Args:
        value: dictionaries, lists and tuples of leaves.
        path: name of the value, the beginning of the names inside it, also shown in errors.
        leaf: function that encodes a value that is not a container.

    Raises:
        DataError: the value cannot be encoded as JSON.
    """
    try:
        return _encode(value, path, leaf)
    except RecursionError:
        raise DataError(
            f"{path or 'the state'}: expected nested values, got one that is nested too deep or "
            f"in itself"
        ) from None


def _encode(value: Any, path: str, leaf: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, Mapping):
        items = {key: _encode(item, _extend(path, key), leaf) for key, item in value.items()}
        return encode_dict(items)
    if type(value) in (list, tuple):
        items = [_encode(item, _extend(path, at), leaf) for at, item in enumerate(value)]
        return {"$tuple": items} if type(value) is tuple else items
    return leaf(value, path)


def nest(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """The tree of leaves by flat names.

    Args:
        leaves: trees by name.
        paths: where names stand; a name without one stands at the top.

    Raises:
        DataError: a name stands inside of another.
    """
    root: dict[Any, Any] = {}
    for name, tree in leaves.items():
        path = paths.get(name, (name,))
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or path[-1] in node:
            raise DataError(
                f"expected one value at {'.'.join(map(str, path))!r}, got two; rename one"
            )
        node[path[-1]] = _Leaf(tree)
    return _close(root)


class _Leaf(NamedTuple):
    tree: Any


def _close(node: Any) -> Any:
    if isinstance(node, _Leaf):
        return node.tree
    items = {key: _close(value) for key, value in node.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == [*range(len(items))]:
        return [items[at] for at in range(len(items))]
    return encode_dict(items)


def expand(extra: Mapping[str, Any], tensors: Iterable[str]) -> Any:
    """The tree without modules and optimizers, and with every tensor at its place.

    Args:
        extra: of a checkpoint: its "tree", and in "ranks" what differs by rank. The tree has rank
            0's of that; where it has nothing, all ranks' values become a list.
        tensors: names of all tensors. Those that the tree has no place for stand at the top.
    """
    tree = {} if extra["tree"] is None else extra["tree"]
    walk = _Expansion(list(tensors), extra.get("ranks", {}), list(_modules("", tree)))
    found = walk.visit("", tree)
    rest = {name: {"$tensor": name} for name in walk.names if name not in walk.placed}
    return encode_dict({**dict(_list_items_of(found)), **rest}) if rest else found


def flatten(tree: Any) -> Flat:
    """Values and paths of an expanded tree by flat names, as torch's default planner cuts it.

    Lists and tuples are values unless tensors or dictionaries are in them; empty dictionaries are
    nothing.

    Raises:
        DataError: two paths give one name.
    """
    found = Flat({}, {}, {})
    _flatten((), tree, found)
    return found


def _flatten(path: Path, tree: Any, found: Flat) -> None:
    if _is_dict(tree):
        for key, item in _list_items_of(tree):
            _flatten((*path, str(key)), item, found)
    elif _is_cut(tree):
        for at, item in enumerate(_list_items(tree)):
            _flatten((*path, at), item, found)
    else:
        name = ".".join(map(str, path))
        if name in found.paths:
            raise DataError(f"expected one value named {name!r}, got two; rename a key")
        found.paths[name] = path
        if _get_kind(tree) == "$tensor":
            found.tensors[name] = tree["$tensor"]
        else:
            found.values[name] = decode_tree(tree, _refuse_tensor)


def at_path(tree: Any, path: Iterable[str | int]) -> Any:
    """The tree at a path.

    Raises:
        DataError: there is none.
    """
    for key in path:
        items = dict(enumerate(_list_items(tree)) if isinstance(key, int) else _list_items_of(tree))
        if key not in items:
            raise DataError(f"extra values: expected one at {path}, found none; damaged")
        tree = items[key]
    return tree


def _is_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and _get_kind(tree) in ("", "$dict")


def _is_cut(tree: Any) -> bool:
    """Whether a list has tensors or dictionaries in it."""
    items = _list_items(tree)
    return any(_get_kind(item) == "$tensor" or _is_dict(item) or _is_cut(item) for item in items)


def _list_items(tree: Any) -> list[Any]:
    if _get_kind(tree) == "$tuple":
        return tree["$tuple"]
    return tree if isinstance(tree, list) else []


def _refuse_tensor(name: str) -> Any:
    raise DataError(
        f"expected tensors in containers only, got {name!r} inside another value; the file is "
        f"damaged"
    )


def _get_kind(tree: Any) -> str:
    """The tag of a tagged value, empty if it is none."""
    is_tagged = isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)).startswith("$")
    return next(iter(tree)) if is_tagged else ""


def _list_items_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and trees of a dictionary's tree."""
    if _get_kind(tree) == "$dict":
        return ((decode_tree(key, _refuse_tensor), item) for key, item in tree["$dict"])
    return iter(tree.items() if isinstance(tree, dict) else ())


def _extend(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


class _Expansion:
    def __init__(
        self, names: list[str], ranks: Mapping[str, list[Any]], modules: list[str]
    ) -> None:
        self.names = names
        self._ranks = ranks
        self._modules = modules
        self.placed: set[str] = set()

    def visit(self, path: str, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.visit(_extend(path, at), item) for at, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        match _get_kind(tree):
            case "$tensor" | "$array" as kind:
                self.placed.add(tree[kind])
                return {"$tensor": tree[kind]}
            case "$tuple":
                return {"$tuple": self.visit(path, tree["$tuple"])}
            case "$as":
                # Other formats have plain containers only.
                return self.visit(path, tree["$as"][1])
            case "$module":
                return self._module(path, tree["$module"])
            case "$optimizer":
                return self._optimizer(path, tree["$optimizer"])
            case "$ranks":
                return self.visit(path, self._ranks.get(path, []))
            case "" | "$dict":
                items = {
                    key: self.visit(_extend(path, key), item) for key, item in _list_items_of(tree)
                }
                return encode_dict(items)
        return tree

    def _take_tensors(self, path: str) -> Iterator[tuple[str, Any]]:
        prefix = f"{path}." if path else ""
        for name in self.names:
            if name.startswith(prefix) and name not in self.placed:
                self.placed.add(name)
                yield name.removeprefix(prefix), {"$tensor": name}

    def _module(self, path: str, extra: Any) -> Any:
        items = dict(self._take_tensors(path))
        for name, item in _list_items_of(extra):
            items[name.removeprefix(f"{path}." if path else "")] = self.visit(name, item)
        return encode_dict(items)

    def _optimizer(self, path: str, content: Any) -> Any:
        names = [name for group in content["groups"] for name in group["params"]]
        # torch names parameters from their module on, the checkpoint from the state's root on.
        prefix = next((m for m in self._modules if all(n.startswith(m) for n in names)), "")
        state: dict[str, dict[str, Any]] = {}
        for rest, leaf in self._take_tensors(_extend(path, "state")):
            name, _, key = rest.rpartition(".")
            state.setdefault(name.removeprefix(prefix), {})[key] = leaf
        for name, values in content["values"].items():
            items = {key: self.visit(f"{path}.{name}.{key}", item) for key, item in values.items()}
            state.setdefault(name.removeprefix(prefix), {}).update(items)
        groups = []
        for group in content["groups"]:
            params = [name.removeprefix(prefix) for name in group["params"]]
            settings = dict(_list_items_of(self.visit(path, group["settings"])))
            groups.append(encode_dict({**settings, "params": params}))
        states = encode_dict({name: encode_dict(items) for name, items in state.items()})
        return {"state": states, "param_groups": groups}


def _modules(path: str, tree: Any) -> Iterator[str]:
    """What names of parameters begin with, for each module of a tree."""
    if _get_kind(tree) == "$module":
        yield f"{path}." if path else ""
    elif _get_kind(tree) == "$as":
        yield from _modules(path, tree["$as"][1])
    elif _is_dict(tree):
        for key, item in _list_items_of(tree):
            yield from _modules(_extend(path, key), item)
    else:
        for at, item in enumerate(_list_items(tree)):
            yield from _modules(_extend(path, at), item)
