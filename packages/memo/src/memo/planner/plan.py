"""A plan: what every layer keeps, stores and computes again, and what that was predicted to take."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memo.config import check_store, shown
from memo.planner.explanation import explain
from memo.planner.layer_plan import ATTENTION, CUT, INPUT, LayerPlan, check_fraction
from shared.errors import ConfigError, DataError, DiskFullError
from shared.files import read_json, write_atomically

__all__ = ["Plan"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `memo.apply` carries out.

    Attributes:
        layers: a plan a layer, in the order of the forward; a single one is every layer's.
        store: "memory", "pinned" or "file:DIR".
        store_limit_bytes: most bytes in the store at once; None: no limit.
        cut: kept rows of a product are a multiple of it, or all: matrix products of so many rows give the
            same bits as those of all.
        num_buffers: layers whose stored items are back on the device at once.
        max_sending: layers whose items may be on their way to the store at once.
        has_block_loss: whether the loss is computed without all logits in memory, in blocks.
        prediction: what the plan was predicted to take, by name; empty where nobody predicted.

    Raises:
        ConfigError: `layers` holds something else or nothing, a number is not whole or too small, or
            the store is malformed.
    """

    layers: tuple[LayerPlan, ...]
    store: str = "memory"
    store_limit_bytes: int | None = None
    cut: int = CUT
    num_buffers: int = 2
    max_sending: int = 2
    has_block_loss: bool = False
    prediction: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers: object = self.layers
        is_tuple = isinstance(layers, tuple) and all(isinstance(one, LayerPlan) for one in layers)
        if not (is_tuple and layers):
            raise ConfigError(
                f"plan.layers: expected a tuple of one LayerPlan or more, got {shown(layers)}; take Plan.fixed, or "
                "plan by memo.autotune"
            )
        for name in ("cut", "num_buffers", "max_sending"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"plan.{name}: expected a whole number above 0, got {value!r}; leave it out"
                )
        limit = self.store_limit_bytes
        if limit is not None and not isinstance(limit, int):
            raise ConfigError(
                f"plan.store_limit_bytes: expected whole bytes or None, got {limit!r}; round it"
            )
        check_store("plan.store", self.store)

    @classmethod
    def fixed(cls, *, alpha: float, store: str = "memory", cut: int = CUT) -> Plan:
        """The published plan: every layer's input and attention go whole, of all else a fraction of its rows.

        Args:
            alpha: that fraction, in [0, 1].
            store: "memory", "pinned" or "file:DIR".
            cut: see `Plan`.

        Raises:
            ConfigError: a setting is out of range.
        """
        check_fraction("alpha", alpha)
        layer = LayerPlan(
            mode="restore", stored={INPUT: 1.0, ATTENTION: 1.0}, default_fraction=alpha
        )
        return cls(layers=(layer,), store=store, cut=cut)

    def for_layers(self, count: int) -> Plan:
        """The plan with one layer's plan for each of so many layers.

        Raises:
            ConfigError: it was made for another number of layers.
        """
        if len(self.layers) == count:
            return self
        if len(self.layers) != 1:
            raise ConfigError(
                f"plan.layers: expected plans of the model's {count} layers, got {len(self.layers)}; plan "
                "for this model by memo.autotune"
            )
        return replace(self, layers=self.layers * count)

    def explain(self) -> str:
        """Says in a table what becomes of the layers, what hides, and where each byte goes."""
        return explain(self.layers, self.store, self.prediction, has_block_loss=self.has_block_loss)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file appears whole or not at all.

        Raises:
            DataError: the file cannot be written.
        """
        record = {
            "format": _FORMAT,
            "layers": [layer.to_json() for layer in self.layers],
            **{name: getattr(self, name) for name in _PLAIN},
            "prediction": dict(self.prediction),
        }
        try:
            write_atomically(Path(path), json.dumps(record, indent=1) + "\n")
        except DiskFullError:
            raise
        except OSError as error:
            raise DataError(
                f"{path}: expected a file that can be written, got: {error.strerror}; name one in a folder that is "
                "there"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote.

        Raises:
            DataError: the file is missing, no plan, or of another version, or a field is none that a plan has.
        """
        record = read_json(path, "a plan")
        found = record.get("format") if isinstance(record, dict) else None
        if found != _FORMAT or set(record) != {"format", "layers", "prediction", *_PLAIN}:
            raise DataError(
                f"{path}: expected a plan of format {_FORMAT}, got format {found!r} with "
                f"{sorted(record) if isinstance(record, dict) else type(record).__name__}; plan again"
            )
        try:
            layers = tuple(LayerPlan.from_json(layer) for layer in record["layers"])
            plain = {name: record[name] for name in _PLAIN}
            return cls(layers=layers, prediction=record["prediction"], **plain)
        except (TypeError, AttributeError, ConfigError) as error:
            raise DataError(f"{path}: expected a plan, got {error}; plan again") from error


_PLAIN = ("store", "store_limit_bytes", "cut", "num_buffers", "max_sending", "has_block_loss")
