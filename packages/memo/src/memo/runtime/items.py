"""What a layer's forward makes that its backward cannot do without, or would have to compute again.

Items are the layer's input, what attention returns and keeps, and the results of matrix products.
Everything else that autograd saves follows from them by element-wise operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memo.runtime.dense import Geometry

__all__ = ["ATTENTION", "INPUT", "Item", "LayerPlan", "rows_of"]

INPUT, ATTENTION = "input", "attention"
"""Names of the two items that go whole; products are named by their weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What becomes of one layer's activations between its forward and its backward.

    Attributes:
        mode: "keep": autograd keeps them, as without a plan. "restore": items are kept, stored or computed
            again, everything else is computed again. "whole": every saved tensor is stored, nothing is
            computed again (for layers that a second forward would change).
        resident: items that stay on the device.
        stored: fraction of rows, in [0, 1], that goes to the store, by item; `input` and `attention` go
            whole or not at all.
        default_fraction: fraction of products that `stored` does not name.
    """

    mode: str = "keep"
    resident: frozenset[str] = frozenset()
    stored: Mapping[str, float] = field(default_factory=dict)
    default_fraction: float = 0.0

    def fraction(self, name: str) -> float:
        """Fraction of an item's rows that goes to the store."""
        whole = name in (INPUT, ATTENTION)
        return self.stored.get(name, 0.0 if whole else self.default_fraction)


@dataclass(slots=True)
class Item:
    """One item of one forward.

    Attributes:
        name: INPUT, ATTENTION or the name of a product's weight.
        tensors: on the device; emptied when only the store holds them.
        geometry: of each tensor.
        rows: of a product's result that are kept, of `num_rows`; the first ones.
        versions: of the tensors when they were made: a change in place must not go unnoticed.
    """

    name: str
    tensors: list[Tensor]
    geometry: list[Geometry]
    rows: int
    num_rows: int
    versions: list[int]

    @classmethod
    def of(cls, name: str, tensors: list[Tensor], rows: int = 1, num_rows: int = 1) -> Item:
        """An item of tensors, which it holds apart from autograd's graph."""
        return cls(
            name=name,
            tensors=[tensor.detach() for tensor in tensors],
            geometry=[Geometry.of(tensor) for tensor in tensors],
            rows=rows,
            num_rows=num_rows,
            versions=[tensor._version for tensor in tensors],
        )

    @property
    def stored_bytes(self) -> list[int]:
        """Bytes of each tensor that are kept: its first rows."""
        return [one.num_bytes * self.rows // self.num_rows for one in self.geometry]

    def check_unchanged(self) -> None:
        """Refuses tensors that were changed in place since they were made.

        Raises:
            RuntimeError: as autograd raises for a saved tensor.
        """
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"{self.name} of a layer was changed by an operation in place after the layer saved "
                    f"it for its backward: expected version {version}, got {tensor._version}; write to "
                    "a copy instead"
                )


def rows_of(num_rows: int, fraction: float, cut: int) -> int:
    """Rows that a fraction means: all for 1, else the multiple of `cut` below."""
    if fraction >= 1.0:
        return num_rows
    return min(num_rows, int(num_rows * fraction) // cut * cut)


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor of torch's own class, in memory that can be copied."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided  # type: ignore[union-attr]
