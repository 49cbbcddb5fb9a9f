"""Frozen outputs of one batch: rows that were encoded here, and rows on their way from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from diffusionpipe.planner.traffic import Rows

__all__ = ["FrozenRows"]

Values = Mapping[str, Tensor]


class FrozenRows:
    """Rows by name; a row that is still on its way is waited for when it is read."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Rows, Values]] = []
        self._expected: list[tuple[list[Rows], Callable[[], Values]]] = []

    def add(self, rows: Rows, values: Values) -> None:
        """Adds rows.

        Args:
            rows: first row of the batch, and the one after the last.
            values: by name, as many rows each.
        """
        self._pieces.append((rows, values))

    def expect(self, ranges: Sequence[Rows], wait: Callable[[], Values]) -> None:
        """Announces rows that `wait` returns, range behind range."""
        self._expected.append((list(ranges), wait))

    def read(self, names: Collection[str], rows: Rows) -> dict[str, Tensor]:
        """Returns rows of some outputs, once they are there.

        Raises:
            CommError: a rank that encodes some of them died or the timeout passed.
        """
        self._receive(rows)
        result = {}
        for name in names:
            parts = []
            for (first, stop), values in self._pieces:
                start, end = max(first, rows[0]), min(stop, rows[1])
                if name in values and start < end:
                    parts.append((start, values[name][start - first : end - first]))
            parts.sort(key=lambda part: part[0])
            num_rows = sum(len(part) for _, part in parts)
            assert num_rows == rows[1] - rows[0], f"{name}: {num_rows} of the rows {rows} are here"
            result[name] = parts[0][1] if len(parts) == 1 else torch.cat([p for _, p in parts])
        return result

    def _receive(self, rows: Rows) -> None:
        waiting = []
        for ranges, wait in self._expected:
            if any(first < rows[1] and rows[0] < stop for first, stop in ranges):
                values, offset = wait(), 0
                for first, stop in ranges:
                    end = offset + stop - first
                    self.add((first, stop), {name: v[offset:end] for name, v in values.items()})
                    offset = end
            else:
                waiting.append((ranges, wait))
        self._expected = waiting
