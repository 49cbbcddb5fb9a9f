"""Non-tensor values of a state as JSON: read back exactly, or refused when saved.

JSON has no tuples, bytes, non-string keys, non-finite numbers or numpy's types; those are written as
objects with one key that begins with a dollar sign. Nothing is ever unpickled: of classes derived
from dict, list and tuple only those named here are made when reading.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shared.errors import DataError

__all__ = [
    "decode_tree",
    "describe_class",
    "dump",
    "encode_leaf",
    "get_class",
    "has_only_values",
    "is_known_class",
    "parse",
]

_NUMBER_KINDS = "biufc"
"""numpy's truth values, whole numbers, floating-point and complex numbers."""

_DERIVED = {kind.__name__: kind for kind in (Counter, OrderedDict, torch.Size)}
"""Classes derived from dict and tuple that are made when reading."""
_FACTORIES: dict[str, Any] = {
    f"defaultdict({kind.__name__})": kind
    for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
} | {f"defaultdict({kind})": factory for kind, factory in (*_DERIVED.items(), ("None", None))}
"""What a defaultdict makes for a missing key, by the name that is written."""


def encode_leaf(value: Any, path: str) -> Any:
    """Encodes a value that is not a container as JSON.

    Args:
        value: a number, text, bytes, bytearray, truth value or None; numpy's numbers too.
        path: shown in errors.

    Raises:
        DataError: it cannot be encoded as JSON, and unpickling it later would run code.
    """
    kind = type(value)
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"$complex": [encode_leaf(value.real, path), encode_leaf(value.imag, path)]}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBER_KINDS:
        data = base64.b64encode(value.tobytes()).decode("ascii")
        return {"$scalar": [value.dtype.str, data]}
    if isinstance(value, enum.Enum):
        raise DataError(
            f"{path}: expected numbers and texts, got the member {value} of an enum, which would "
            f"come back as a plain value; store {value.name!r} or its value"
        )
    raise DataError(
        f"{path}: expected tensors, numbers, texts, lists and dictionaries, got a "
        f"{type(value).__module__}.{type(value).__qualname__}; give it state_dict() and "
        f"load_state_dict(), or store what it is made of"
    )


def describe_class(value: Any) -> str:
    """Names the class of a dictionary, list or tuple: "dict", "Counter", "defaultdict(int)", ..."""
    kind = type(value)
    if kind in (dict, list, tuple) or _DERIVED.get(kind.__name__) is kind:
        return kind.__name__
    if kind is defaultdict:
        factory = value.default_factory
        name = getattr(factory, "__qualname__", str(factory))
        # A function of the user's may have the name of a class.
        known = _FACTORIES.get(f"defaultdict({name})", kind)
        if factory is known:
            return f"defaultdict({name})"
    return f"{kind.__module__}.{kind.__qualname__}"


def is_known_class(name: str) -> bool:
    """Whether reading can make a container of this class."""
    return name in ("dict", "list", "tuple") or name in _DERIVED or name in _FACTORIES


def get_class(tree: Any) -> str | None:
    """The class of a container that was encoded, as `describe_class` names it; None if it is none."""
    match tree:
        case list():
            return "list"
        case {"$tuple": _}:
            return "tuple"
        case {"$as": [str() as name, _]}:
            return name
        case dict() if len(tree) != 1 or "$dict" in tree or not next(iter(tree)).startswith("$"):
            return "dict"
    return None


def has_only_values(tree: Any) -> bool:
    """Whether what was encoded has no tensors, modules or other objects."""
    if isinstance(tree, list):
        return all(map(has_only_values, tree))
    if not isinstance(tree, dict):
        return True
    if len(tree) == 1 and not {"$tensor", "$array", "$module", "$optimizer", "$ranks"}.isdisjoint(
        tree
    ):
        return False
    return all(map(has_only_values, tree.values()))


def encode_dict(items: Mapping[Any, Any], path: str = "") -> Any:
    """A dictionary whose values are encoded already; the path is for errors."""
    if any(isinstance(key, float | np.floating) and math.isnan(key) for key in items):
        # No two of them are equal, so that none is ever loaded into another.
        raise DataError(f"{path}: expected keys that are equal to themselves, got nan; rename it")
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return dict(items)
    return {"$dict": [[encode_leaf(key, f"{path}, a key"), value] for key, value in items.items()]}


def decode_tree(tree: Any, tensor: Callable[[str], Any], *, is_plain: bool = False) -> Any:
    """Decodes a tree.

    Args:
        tree: JSON.
        tensor: function from a name to its tensor.
        is_plain: whether containers of the user's classes become plain ones.

    Raises:
        DataError: the tree was not written by this module, or a container is of the user's class.
    """
    if isinstance(tree, list):
        return [decode_tree(item, tensor, is_plain=is_plain) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind.startswith("$"):
            try:
                return _decode_tagged(kind, content, tensor, is_plain=is_plain)
            except DataError:
                raise
            except (TypeError, ValueError, KeyError) as error:
                raise DataError(f"extra values: {kind} with content {content!r:.60}") from error
    return {key: decode_tree(item, tensor, is_plain=is_plain) for key, item in tree.items()}


def _decode_tagged(kind: str, content: Any, tensor: Callable[[str], Any], *, is_plain: bool) -> Any:
    def decode(item: Any) -> Any:
        return decode_tree(item, tensor, is_plain=is_plain)

    match kind:
        case "$tensor":
            return tensor(content)
        case "$array":
            found = tensor(content)
            return found.numpy() if hasattr(found, "numpy") else found
        case "$tuple":
            return tuple(map(decode, content))
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$bytearray":
            return bytearray(base64.b64decode(content, validate=True))
        case "$scalar":
            dtype, data = np.dtype(content[0]), base64.b64decode(content[1], validate=True)
            if dtype.kind not in _NUMBER_KINDS or len(data) != dtype.itemsize:
                raise ValueError(f"{len(data)} bytes are no number of type {dtype}")
            return np.frombuffer(data, dtype)[0]
        case "$float":
            return float(content)
        case "$complex":
            return complex(*map(decode, content))
        case "$dict":
            return {decode(key): decode(value) for key, value in content}
        case "$as":
            name, inner = content
            return _make(name, inner, decode, is_plain=is_plain)
        case "$module" | "$optimizer" | "$ranks":
            return decode(content)
    raise ValueError(f"unknown kind {kind}")


def _make(name: str, content: Any, decode: Callable[[Any], Any], *, is_plain: bool) -> Any:
    """Makes a container of a derived class."""
    if name in _DERIVED:
        return _DERIVED[name](decode(content))
    if name in _FACTORIES:
        return defaultdict(_FACTORIES[name], decode(content))
    if is_plain:
        return decode(content)
    raise DataError(
        f"expected a {name} in the state to load a saved {name} into, got none: its class is not "
        f"made when reading; put one there before loading"
    )


def dump(tree: Any) -> bytes:
    """The bytes of a tree; equal for trees that are equal, including the order of keys."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes, where: str) -> Any:
    """The tree of bytes.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON, {error}; the file is damaged") from error


def merge_trees(trees: list[Any]) -> dict[str, list[Any]]:
    """Where the ranks' trees differ: by path, each rank's value, in order of the ranks.

    Lists and dictionaries that have the same keys on all ranks are looked into.
    """
    found: dict[str, list[Any]] = {}
    _find_differences("", trees, found)
    return found


def _find_differences(path: str, trees: list[Any], found: dict[str, list[Any]]) -> None:
    first = trees[0]
    if all(tree == first for tree in trees):
        return
    if all(isinstance(tree, dict) and tree.keys() == first.keys() for tree in trees):
        keys = list(first)
        is_plain = not any(key.startswith("$") for key in keys)
    else:
        is_list = all(isinstance(tree, list) and len(tree) == len(first) for tree in trees)
        keys, is_plain = list(range(len(first))) if is_list else [], is_list
    if not is_plain:
        if path in found:
            raise DataError(
                f"two values that differ between ranks are named {path!r}; rename a key: keys are "
                f"joined by dots"
            )
        found[path] = trees
        return
    for key in keys:
        inner = f"{path}.{key}" if path else str(key)
        _find_differences(inner, [tree[key] for tree in trees], found)
