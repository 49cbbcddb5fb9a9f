"""A column whose rows differ in length: concatenated values, and each row's length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared.errors import DataError

__all__ = ["Ragged"]


class Ragged:
    """Rows [length, ...] of different lengths, without padding between them.

    Attributes:
        values: [sum of lengths, ...].
        lengths: int64 [rows].
    """

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        """Makes a column of concatenated rows.

        Raises:
            DataError: if the lengths are negative or do not add up to the values.
        """
        lengths = lengths.to(torch.int64)
        if lengths.dim() != 1 or bool((lengths < 0).any()) or int(lengths.sum()) != len(values):
            raise DataError(
                f"expected lengths of rows, none negative, that add up to {len(values)} values, "
                f"got {int(lengths.sum())} in {list(lengths.shape)}"
            )
        self.values, self.lengths = values, lengths
        self._ends = lengths.cumsum(0)

    @staticmethod
    def of(rows: Sequence[Tensor]) -> Ragged:
        """A column of these rows.

        Raises:
            DataError: if there is no row, so that the dtype is unknown.
        """
        if not rows:
            raise DataError("expected at least one row, got none")
        return Ragged(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    def __repr__(self) -> str:
        return f"ragged {str(self.values.dtype).removeprefix('torch.')}[{len(self)}, {len(self.values)} in all]"

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def __getitem__(self, rows: slice) -> Ragged:
        """Consecutive rows, as a view.

        Raises:
            DataError: the slice leaves rows out.
        """
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise DataError(f"expected consecutive rows, got every {step}th; use `take`")
        first = int(self._ends[start - 1]) if start else 0
        last = int(self._ends[stop - 1]) if stop > start else first
        return Ragged(self.values[first:last], self.lengths[start : max(start, stop)])

    def take(self, index: Tensor) -> Ragged:
        """The rows at some positions."""
        rows = list(self)
        if not len(index):
            return Ragged(self.values[:0], self.lengths[:0])
        return Ragged.of([rows[k] for k in index.tolist()])

    def padded(self, fill: float = 0) -> Tensor:
        """A tensor [rows, longest, ...], each row padded on the right with `fill`."""
        if not len(self):
            return self.values.new_empty(0, 0, *self.values.shape[1:])
        return torch.nn.utils.rnn.pad_sequence(list(self), batch_first=True, padding_value=fill)

    def to(self, device: str | torch.device) -> Ragged:
        """The same on another device."""
        return Ragged(self.values.to(device), self.lengths)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and torch.equal(self.lengths, other.lengths)
            and torch.equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]
