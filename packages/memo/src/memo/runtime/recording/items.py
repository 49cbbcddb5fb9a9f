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

from memo.runtime.recording.dense import Geometry, is_dense

__all__ = ["Item", "Watch", "can_watch", "is_plain"]


class Watch:
    """Notices changes in place of a tensor, whose memory it does not keep."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        """Notes the tensor's version, as autograd would."""
        self._version = tensor._version
        self._alias = tensor.detach()  # shares the counter of versions
        if not isinstance(tensor, FakeTensor):
            self._alias.data = tensor.new_empty(0)

    @property
    def has_changed(self) -> bool:
        """Whether the tensor was written to since."""
        return self._alias._version != self._version

    def check(self, what: str) -> None:
        """Refuses a tensor that was written to since.

        Raises:
            RuntimeError: as autograd raises for a saved tensor.
        """
        if self.has_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {what} is at version {self._alias._version}; expected version "
                f"{self._version} instead; write to a copy"
            )


@dataclass(slots=True)
class Item:
    """One item of one forward.

    Attributes:
        name: of the input, attention, or a product's weight.
        tensors: on the device; emptied when only the store holds them.
        geometry: of each tensor.
        rows: of a product's result that are kept, of `num_rows`; the first ones.
        watches: of the tensors since they were made.
        can_move: whether every tensor fills one stretch of memory.
    """

    name: str
    tensors: list[Tensor]
    geometry: list[Geometry]
    rows: int
    num_rows: int
    watches: list[Watch]
    can_move: bool

    @classmethod
    def of(cls, name: str, tensors: list[Tensor], rows: int = 1, num_rows: int = 1) -> Item:
        """An item of tensors, which it holds apart from autograd's graph."""
        return cls(
            name=name,
            tensors=[tensor.detach() for tensor in tensors],
            geometry=[Geometry.of(tensor) for tensor in tensors],
            rows=rows,
            num_rows=num_rows,
            watches=[Watch(tensor) for tensor in tensors],
            can_move=all(map(is_dense, tensors)),
        )

    @property
    def stored_bytes(self) -> list[int]:
        """Bytes of each tensor that are kept: its first rows."""
        return [one.num_bytes * self.rows // self.num_rows for one in self.geometry]

    def place(self, memory: Sequence[Tensor]) -> None:
        """Takes the tensors over memory that holds their kept rows, uint8 each."""
        pairs = zip(self.geometry, memory, strict=True)
        self.tensors = [one.view(place) for one, place in pairs]

    @property
    def has_changed(self) -> bool:
        """Whether a tensor was written to since it was made."""
        return any(watch.has_changed for watch in self.watches)

    def check_unchanged(self) -> None:
        """Refuses tensors that were written to since they were made.

        Raises:
            RuntimeError: as autograd raises for a saved tensor.
        """
        for watch in self.watches:
            watch.check(f"{self.name} of a layer")


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor of torch's own class, in memory that can be copied or is only counted."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided  # type: ignore[union-attr]


def can_watch(tensor: Tensor) -> bool:
    """Whether changes in place of a tensor can be noticed."""
    return is_plain(tensor) and not tensor.is_inference()


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
