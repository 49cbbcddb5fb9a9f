"""How a model's batch was cut, as plans carry it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["MAX_PARTS", "BatchCut"]

MAX_PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """How a model's batch was cut before its graphs were captured.

    Attributes:
        digest: of the traced model and the shapes of its inputs; empty where nothing was chosen.
        ranges: first, stop and number of parts of each, in order, as numbers of nodes; empty where the
            batch stays whole.
        extra_bytes: what parts may add to a rank's memory.
    """

    digest: str = ""
    ranges: tuple[tuple[int, int, int], ...] = ()
    extra_bytes: int = 0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> BatchCut:
        """What `asdict` made values of, and JSON lists."""
        ranges = tuple((first, stop, parts) for first, stop, parts in values.get("ranges", ()))
        others = {name: value for name, value in values.items() if name != "ranges"}
        return replace(cls(**others), ranges=ranges)
