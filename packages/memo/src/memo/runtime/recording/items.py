"""What a layer's forward makes that its backward cannot do without, or would have to compute again.

Items are the layer's input, what attention returns and keeps, and the results of matrix products.
Everything else that autograd saves follows from them by element-wise operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memo.runtime.recording.dense import Geometry

__all__ = ["Item", "is_plain"]


@dataclass(slots=True)
class Item:
    """One item of one forward.

    Attributes:
        name: of the input, attention, or a product's weight.
        tensors: on the device; emptied when only the store holds them.
        geometry: of each tensor.
        rows: of a product's result that are kept, of `num_rows`; the first ones.
        versions: of the tensors when they were made: a change in place must not go unnoticed. None of
            those that came back from the store, which nobody else sees.
    """

    name: str
    tensors: list[Tensor]
    geometry: list[Geometry]
    rows: int
    num_rows: int
    versions: list[int] | None

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

    def place(self, memory: Sequence[Tensor]) -> None:
        """Takes the tensors over memory that holds their kept rows, uint8 each."""
        pairs = zip(self.geometry, memory, strict=True)
        self.tensors, self.versions = [one.view(place) for one, place in pairs], None

    def check_unchanged(self) -> None:
        """Refuses tensors that were changed in place since they were made.

        Raises:
            RuntimeError: as autograd raises for a saved tensor.
        """
        for tensor, version in zip(self.tensors, self.versions or (), strict=False):
            if tensor._version != version:
                raise RuntimeError(
                    f"{self.name} of a layer was changed by an operation in place after the layer saved "
                    f"it for its backward: expected version {version}, got {tensor._version}; write to "
                    "a copy instead"
                )


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor of torch's own class, in memory that can be copied or is only counted."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided  # type: ignore[union-attr]


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
