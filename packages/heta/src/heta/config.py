"""Settings of a training: the same dataclass in Python, in a YAML recipe and on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from heta.nn.registry import check_model
from shared.errors import ConfigError
from shared.files import read_text
from shared.units import parse_bytes

__all__ = ["RowRule", "TrainConfig", "WireFormat", "read_recipe"]

_WORDS = {"int": "a whole number", "float": "a number", "list": "a list of whole numbers"}

RowRule = Literal["adam", "adagrad"]
WireFormat = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of `heta train`.

    Attributes:
        model: a name of `heta.nn.registry`, or "file.py:function" or "module:function" of a function
            (part, hidden, num_classes) that makes one.
        epochs: passes over the labelled nodes of the split "train".
        lr: learning rate of Adam for the model's parameters.
        row_lr: learning rate of learnable rows.
        row_rule: their optimizer: "adam", or "adagrad" with one number a row.
        batch_size: seeds of a step over all ranks; None: the plan's.
        fanouts: in-edges drawn of a node and relation, the hop next to the seeds first, -1 for all;
            None: the plan's.
        wire: form in which merged rows travel.
        cache: memory for other hosts' rows, as "256MB"; with "edge-cut" only; None: no cache.
        seed: of initial values, the order of seeds and all draws.

    Raises:
        ConfigError: a setting is out of range, or the model is unknown.
    """

    model: str = "rgcn"
    epochs: int = 10
    lr: float = 1e-2
    row_lr: float = 1e-2
    row_rule: RowRule = "adam"
    batch_size: int | None = None
    fanouts: tuple[int, ...] | None = None
    wire: WireFormat = "float32"
    cache: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_model(self.model)
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {value}")
        for name in ("lr", "row_lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        for name, kind in (("row_rule", RowRule), ("wire", WireFormat)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name}: expected one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.cache is not None:
            parse_bytes(self.cache)

    def to_json(self) -> str:
        """Writes the settings as JSON text, for `from_mapping`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], source: str) -> TrainConfig:
        """Makes the configuration of named settings; those left out have their defaults.

        Args:
            settings: values by name.
            source: where they come from, for messages.

        Raises:
            ConfigError: a name is unknown, or a value is invalid.
        """
        types = {field.name: str(field.type) for field in fields(cls)}
        values = {}
        for name, value in settings.items():
            if name not in types:
                near = get_close_matches(str(name), types, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{source}: expected settings among {', '.join(types)}, got {name!r}{hint}"
                )
            values[name] = _read_value(value, types[name], f"{source}: {name}")
        return cls(**values)


def read_recipe(path: Path | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Reads the settings of a YAML file, above which others stand.

    Args:
        path: the file; None: the defaults.
        settings: values by name that replace the file's.

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
        DataError: the file is missing or empty.
    """
    if path is None:
        return TrainConfig.from_mapping(settings, "settings")
    try:
        tree = yaml.safe_load(read_text(path, "a recipe as YAML"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected a recipe as YAML, got {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected settings by name, as epochs: 5, got {tree!r}")
    return TrainConfig.from_mapping({**tree, **settings}, str(path))


def _read_value(value: Any, kind: str, key: str) -> Any:
    """Converts a value of YAML or JSON to a field's type, and refuses one of another type."""
    kind, _, none = kind.partition(" | ")
    if value is None and none:
        return None
    if kind == "int" and type(value) is int:
        return value
    if kind == "float":
        # YAML reads 1e-3 as a text.
        with suppress(TypeError, ValueError):
            return float("" if isinstance(value, bool) else value)
    if kind.startswith("tuple"):
        if isinstance(value, list | tuple) and all(type(each) is int for each in value):
            return tuple(value)
        kind = "list"
    if kind not in _WORDS and isinstance(value, str):
        return value
    raise ConfigError(f"{key}: expected {_WORDS.get(kind, 'a text')}, got {value!r}")
