"""What becomes of one layer's activations between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Real
from typing import Any

from shared.errors import ConfigError

__all__ = ["ATTENTION", "CUT", "INPUT", "LayerPlan", "check_fraction", "rows_of", "runs_of"]

INPUT, ATTENTION = "input", "attention"
"""Items that go whole or not at all; the others are products, named by their weight."""

CUT = 16
"""Kept rows of a product are a multiple of it, unless a plan says otherwise."""

_MODES = ("keep", "restore", "whole", "tiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What becomes of one layer's activations.

    Items are the layer's input, what attention returns and keeps, and the results of matrix products.

    Attributes:
        mode: "keep": autograd keeps all it saves, as without a plan. "restore": items stay, are stored or
            computed again, and everything else is computed again. "whole": all that autograd saves is
            stored and nothing computed again, for layers that another forward would change. "tiles": row-local
            parts run tile by tile, forward and again backward; input and attention stay, are stored, or
            (attention only) are computed again. Gradients of weights are then sums over tiles, which
            differ from plain ones by rounding.
        resident: items that stay on the device.
        stored: fraction of its rows, in [0, 1], that goes to the store, by item.
        default_fraction: the fraction of products that neither names.
        tile_rows: rows of a tile, of all sequences together; 0 in other modes than "tiles".
    """

    mode: str = "keep"
    resident: frozenset[str] = frozenset()
    stored: Mapping[str, float] = field(default_factory=dict)
    default_fraction: float = 0.0
    tile_rows: int = 0

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ConfigError(
                f"layer.mode: expected one of {', '.join(_MODES)}, got {self.mode!r}; take one of these"
            )
        if (self.mode == "tiles") != (self.tile_rows > 0):
            raise ConfigError(
                "layer.tile_rows: expected a number above 0 in mode 'tiles' and 0 in others, got "
                f"{self.tile_rows} in mode {self.mode!r}"
            )
        products = {*self.stored, *self.resident} - {INPUT, ATTENTION}
        if self.mode == "tiles" and (products or self.default_fraction):
            raise ConfigError(
                f"layer: expected only {INPUT!r} and {ATTENTION!r} to be kept in mode 'tiles', got "
                f"{sorted(products)} and default_fraction {self.default_fraction}"
            )
        for name, value in self.stored.items():
            check_fraction(f"layer.stored[{name!r}]", value)
        check_fraction("layer.default_fraction", self.default_fraction)
        for name in (INPUT, ATTENTION):
            if self.stored.get(name, 0.0) not in (0.0, 1.0):
                raise ConfigError(
                    f"layer.stored[{name!r}]: expected 0 or 1, as it goes whole, got {self.stored[name]}"
                )

    def fraction(self, name: str) -> float:
        """Fraction of an item's rows that goes to the store."""
        if name in self.resident:
            return 0.0
        default = 0.0 if name in (INPUT, ATTENTION) else self.default_fraction
        return self.stored.get(name, default)

    @property
    def has_stored(self) -> bool:
        """Whether anything of the layer goes to the store."""
        return self.mode == "whole" or (
            self.mode in ("restore", "tiles")
            and (self.default_fraction > 0 or any(self.stored.values()))
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as what `json` can write."""
        return {
            "mode": self.mode,
            "resident": sorted(self.resident),
            "stored": dict(self.stored),
            "default_fraction": self.default_fraction,
            "tile_rows": self.tile_rows,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LayerPlan:
        """Reads what `to_json` made.

        Raises:
            ConfigError: a field is unknown, missing or out of range.
        """
        try:
            known: dict[str, Any] = {**record, "resident": frozenset(record["resident"])}
            return cls(**known)
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"layer: expected mode, resident, stored, default_fraction and tile_rows, got {sorted(record)}; "
                "write plans with Plan.save"
            ) from error


def check_fraction(where: str, value: object) -> None:
    """Refuses what is no fraction.

    Args:
        where: the setting, for the message.
        value: what it is set to.

    Raises:
        ConfigError: it is no number, or out of [0, 1].
    """
    if not (isinstance(value, Real) and 0 <= float(value) <= 1):
        raise ConfigError(
            f"{where}: expected a fraction in [0, 1], got {value!r}; give a number such as 0.5"
        )


def runs_of(layers: Sequence[LayerPlan]) -> list[tuple[LayerPlan, int]]:
    """Plans of layers that follow one another and are alike, and how many there are."""
    return [(plan, sum(1 for _ in alike)) for plan, alike in groupby(layers)]


def rows_of(num_rows: int, fraction: float, cut: int) -> int:
    """Rows that a fraction means: all for 1, else the multiple of `cut` below."""
    if fraction >= 1.0:
        return num_rows
    return min(num_rows, int(num_rows * fraction) // cut * cut)
