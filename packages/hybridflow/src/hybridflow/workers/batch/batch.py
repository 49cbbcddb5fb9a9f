"""The table that travels between workers: one row a sample, columns of tensors and of objects.

After the data container of HybridFlow's programming model (arXiv 2409.19256): operations that
change rows (chunk, concatenate, repeat, reorder, pad) act on all columns at once, and joining two
tables refuses columns that disagree, so that rows can not silently get out of step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.workers.batch.huge_pages import concatenate
from hybridflow.workers.batch.ragged import Ragged
from shared.errors import ConfigError, DataError

__all__ = ["PADDING", "Batch"]

PADDING = "is_padding"
"""Column that marks padding rows, added to make splits even; losses must give them no weight."""


class Batch:
    """Columns of equal length: tensors [rows, ...], `Ragged` ones, or lists of objects.

    Example:
        >>> import torch
        >>> batch = Batch(prompt=torch.arange(6).view(3, 2), name=["a", "b", "c"])
        >>> [len(part) for part in batch.chunk(2)], batch.repeat(2)["name"]
        ([2, 1], ['a', 'a', 'b', 'b', 'c', 'c'])
    """

    def __init__(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        meta: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Makes a table; columns may be given as a mapping or as keywords.

        Args:
            columns: by name; a sequence other than a tensor becomes a list of objects.
            meta: values of the whole table, such as a temperature.
            **more: further columns.

        Raises:
            DataError: if columns differ in length.
        """
        self._columns: dict[str, Any] = {}
        self.meta = dict(meta or {})
        for name, column in {**(columns or {}), **more}.items():
            self[name] = column

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()))) if self._columns else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def keys(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def items(self) -> list[tuple[str, Any]]:
        """Names and columns."""
        return list(self._columns.items())

    def __getitem__(self, name: str) -> Any:
        """A column.

        Raises:
            DataError: there is none of this name.
        """
        if name not in self._columns:
            raise DataError(f"no column {name!r}; there are {', '.join(self._columns) or 'none'}")
        return self._columns[name]

    def __setitem__(self, name: str, column: Any) -> None:
        """Adds or replaces a column; a sequence other than a tensor becomes a list of objects.

        Raises:
            DataError: its number of rows is not that of the other columns.
        """
        if not isinstance(column, Tensor | Ragged):
            column = list(column)
        elif isinstance(column, Tensor) and not column.dim():
            raise DataError(
                f"column {name!r}: expected one value a row, got a tensor of no dimension"
            )
        others = [key for key in self._columns if key != name]
        if others and len(column) != len(self._columns[others[0]]):
            raise DataError(
                f"column {name!r} has {len(column)} rows, and {others[0]!r} "
                f"{len(self._columns[others[0]])}; all columns need one value a row"
            )
        self._columns[name] = column

    def __repr__(self) -> str:
        told = (
            f"{name}: {str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
            if isinstance(column, Tensor)
            else f"{name}: {column!r}"
            if isinstance(column, Ragged)
            else f"{name}: objects"
            for name, column in self._columns.items()
        )
        return f"Batch({len(self)} rows; {', '.join(told)})"

    def __or__(self, other: Any) -> Batch:
        """Both tables' columns.

        Raises:
            DataError: if they differ in length, or in a column that both have.
        """
        if not isinstance(other, Batch):
            return NotImplemented  # a future joins itself from the right
        joined = Batch(self._columns, meta={**self.meta, **other.meta})
        for name, column in other.items():
            if name in joined:
                _refuse_difference(name, joined[name], column)
            joined[name] = column
        return joined

    def select(self, *names: str) -> Batch:
        """Only some columns."""
        return Batch({name: self[name] for name in names}, meta=self.meta)

    def drop(self, *names: str) -> Batch:
        """All columns except some."""
        kept = {name: column for name, column in self.items() if name not in names}
        return Batch(kept, meta=self.meta)

    def rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop), as views where columns are tensors."""
        return self._map(lambda column: column[start:stop])

    def reorder(self, index: Sequence[int] | Tensor) -> Batch:
        """The rows at some positions, in their order; a row may be taken any number of times.

        Raises:
            DataError: the index is a mask.
        """
        index = torch.as_tensor(index)
        if index.dtype == torch.bool:
            raise DataError("expected positions of rows, got a mask; use mask.nonzero().flatten()")
        index = index.to(torch.int64)
        where = index.tolist()
        return self._map(
            lambda column: (
                column[index.to(column.device)]
                if isinstance(column, Tensor)
                else column.take(index)
                if isinstance(column, Ragged)
                else [column[k] for k in where]
            )
        )

    def repeat(self, times: int) -> Batch:
        """Each row `times` times, one after another."""
        return self.reorder(torch.arange(len(self)).repeat_interleave(times))

    def chunk(self, parts: int) -> list[Batch]:
        """Consecutive parts whose lengths differ by one at most.

        Raises:
            DataError: if there are fewer rows than parts.
        """
        if not 1 <= parts <= len(self):
            raise DataError(
                f"expected at least one row for each of {parts} parts, got {len(self)} rows; give "
                f"more rows, or pad them with pad_to({parts})"
            )
        size, larger = divmod(len(self), parts)
        starts = [k * size + min(k, larger) for k in range(parts + 1)]
        return [self.rows(start, stop) for start, stop in itertools.pairwise(starts)]

    def pad_to(self, divisor: int) -> Batch:
        """Pads to a multiple of `divisor` rows by repeating rows from the first on.

        Column PADDING marks the repeated rows.

        Raises:
            DataError: if there is no row to take.
        """
        if not len(self):
            raise DataError("an empty batch cannot be padded; give it at least one row")
        missing = -len(self) % divisor
        index = torch.arange(len(self) + missing)
        padded = self.reorder(index % len(self)) if missing else self
        padded = Batch(padded._columns, meta=self.meta)
        padded[PADDING] = index >= len(self)
        return padded

    def without_padding(self) -> Batch:
        """Rows that PADDING does not mark, without that column."""
        if PADDING not in self:
            return self
        return self.reorder(torch.nonzero(~self[PADDING]).flatten()).drop(PADDING)

    def to(self, device: str | torch.device) -> Batch:
        """Tensors on another device."""
        return self._map(lambda column: column if isinstance(column, list) else column.to(device))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of all, one after another; `meta` of the first.

        Raises:
            ConfigError: if there is none.
            DataError: if they differ in columns, or in the shape of a column's rows.
        """
        if not batches:
            raise ConfigError("expected at least one batch to concatenate, got none")
        first = batches[0]
        if len(batches) == 1:
            return first
        for k, other in enumerate(batches):
            if set(other.keys()) != set(first.keys()):
                raise DataError(
                    f"batch {k} has the columns {sorted(other.keys())}, and the first "
                    f"{sorted(first.keys())}; they must be the same"
                )
        joined = {name: _concat(name, [batch[name] for batch in batches]) for name in first}
        return Batch(joined, meta=first.meta)

    def _map(self, change: Any) -> Batch:
        changed = Batch(meta=self.meta)
        changed._columns = {name: change(column) for name, column in self._columns.items()}
        return changed


def _concat(name: str, columns: list[Any]) -> Any:
    if all(isinstance(column, Tensor) for column in columns):
        if len({(column.dtype, *column.shape[1:]) for column in columns}) > 1:
            raise DataError(
                f"column {name!r}: rows of {[tuple(column.shape[1:]) for column in columns]} and "
                f"{sorted({str(column.dtype) for column in columns})} do not fit into one tensor; "
                f"pad them, or make the column Ragged"
            )
        return concatenate(columns)
    if all(isinstance(column, Ragged) for column in columns):
        return Ragged(
            _concat(name, [column.values for column in columns]),
            torch.cat([column.lengths for column in columns]),
        )
    if all(isinstance(column, list) for column in columns):
        return [value for column in columns for value in column]
    raise DataError(
        f"column {name!r} is {sorted({type(c).__name__ for c in columns})}; make it one"
    )


def _refuse_difference(name: str, ours: Any, theirs: Any) -> None:
    if ours is theirs:
        return
    if type(ours) is not type(theirs) or len(ours) != len(theirs):
        same, row = False, None
    elif isinstance(ours, Tensor):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        row = None
        if same and not (same := bool(torch.equal(ours, theirs))):
            # NaN equals NaN here, because joining a column with itself is allowed.
            differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
            rows = torch.nonzero(differs.flatten(1).any(1) if ours.dim() > 1 else differs)
            same, row = not len(rows), int(rows[0]) if len(rows) else None
    else:
        pairs = zip(ours, theirs, strict=True)
        row = next((k for k, (a, b) in enumerate(pairs) if not _is_same(a, b)), None)
        same = row is None
    if not same:
        where = "in kind, shape or length" if row is None else f"first in row {row}"
        raise DataError(
            f"column {name!r} is in both tables and differs, {where}; drop it from one of them"
        )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return a is b or bool(a == b)
