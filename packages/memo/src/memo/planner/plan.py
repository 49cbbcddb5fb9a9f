"""A plan: what every layer keeps, stores and computes again, and what that was predicted to take."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
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
        layer_kinds: what each layer is by `memo.runtime.layers.kind_of`, in the order of the forward; empty: layers
            of any kind.
        input_shape: of the largest batch as the first layer is given it, [sequences, tokens, width]; None: of any
            shape.
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
    layer_kinds: tuple[str, ...] = ()
    input_shape: tuple[int, ...] | None = None
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
        if not all(isinstance(one, str) for one in self.layer_kinds) or (
            self.layer_kinds and len(self.layer_kinds) != len(self.layers)
        ):
            raise ConfigError(
                f"plan.layer_kinds: expected a text for each of {len(self.layers)} layers, got {self.layer_kinds!r}; "
                "plan by memo.autotune, or leave it out"
            )
        shape = self.input_shape
        if shape is not None and not (shape and all(isinstance(one, int) for one in shape)):
            raise ConfigError(
                f"plan.input_shape: expected whole numbers, the sizes of a layer's input, got {shape!r}; plan by "
                "memo.autotune, or leave it out"
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
        return replace(self, layers=self.layers * count, layer_kinds=self.layer_kinds * count)

    def check_kinds(self, kinds: Sequence[str]) -> None:
        """Refuses layers of other kinds than the plan was made for.

        Args:
            kinds: of the model's layers, in the order of the forward.

        Raises:
            ConfigError: a layer is of another kind.
        """
        pairs = enumerate(zip(self.layer_kinds, kinds, strict=False))
        for number, (planned, kind) in pairs:
            if planned != kind:
                raise ConfigError(
                    f"plan: expected the layers that it was made for, layer {number} of them {planned}, got {kind}; "
                    "plan for this model by memo.autotune"
                )

    def check_input(self, shape: Sequence[int]) -> None:
        """Refuses a batch that may take more memory than the one that the plan was made for.

        Memory grows with a batch's tokens, and that of masks and scores with sequences times tokens squared: both
        must be at most the planned batch's.

        Args:
            shape: of the first layer's input, [sequences, tokens, width] or [tokens, width].

        Raises:
            ConfigError: one of them is larger.
        """
        if self.input_shape is None:
            return
        planned, given = _sizes(self.input_shape), _sizes(shape)
        if given[0] * given[1] > planned[0] * planned[1] or (
            given[0] * given[1] ** 2 > planned[0] * planned[1] ** 2
        ):
            raise ConfigError(
                f"batch: expected at most the planned {planned[0]} sequences of {planned[1]:,} tokens, got "
                f"{given[0]} of {given[1]:,}, whose memory was not promised; plan for the longest batch by "
                "memo.autotune, or cut this one"
            )

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
            **{name: getattr(self, name) for name in (*_PLAIN, *_BINDING)},
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
        version = record.get("format") if isinstance(record, dict) else None
        fields = {"format", "layers", "prediction", *_PLAIN}
        if version != _FORMAT or set(record) - {*_BINDING} != fields:
            raise DataError(
                f"{path}: expected a plan of format {_FORMAT}, got format {version!r} with "
                f"{sorted(record) if isinstance(record, dict) else type(record).__name__}; plan again"
            )
        try:
            layers = tuple(LayerPlan.from_json(layer) for layer in record["layers"])
            plain = {name: record[name] for name in _PLAIN}
            shape = record.get("input_shape")
            return cls(
                layers=layers,
                layer_kinds=tuple(record.get("layer_kinds", ())),
                input_shape=None if shape is None else tuple(shape),
                prediction=record["prediction"],
                **plain,
            )
        except (TypeError, AttributeError, ConfigError) as error:
            raise DataError(f"{path}: expected a plan, got {error}; plan again") from error


_PLAIN = ("store", "store_limit_bytes", "cut", "num_buffers", "max_sending", "has_block_loss")

_BINDING = ("layer_kinds", "input_shape")
"""Fields that say what a plan was made for; a file may lack them."""


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Sequences and tokens of each, of a layer's input; without a batch dimension it is one sequence."""
    *rows, _ = shape
    sequences = rows[0] if len(rows) > 1 else 1
    return sequences, prod(rows) // max(sequences, 1)
