"""A trace: what one training step allocates and frees, in order."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import DataError
from shared.files import check_not_empty, read_text

__all__ = ["Trace"]

_COLUMNS = ("lower", "upper", "size")
_LARGEST = 2**62


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Intervals of tensors, as `pack` and `emulate` take them.

    Attributes:
        intervals: (start, stop, bytes) of each allocation, half-open, in the order of allocation; times
            are numbers of events, or those of a file.
        dropped: what a reader left out, by reason, with counts.
    """

    intervals: tuple[tuple[int, int, int], ...]
    dropped: Mapping[str, int]

    @classmethod
    def from_events(
        cls,
        events: Iterable[Sequence[Any]],
        dropped: Mapping[str, int] | None = None,
    ) -> Trace:
        """A trace of events in order.

        Args:
            events: ("alloc", key, bytes) and ("free", key). A key may be used again once it was freed.
                What is never freed lives to the end.
            dropped: what was left out before, with counts.

        Raises:
            DataError: a key is allocated while it is alive, or freed while it is not; an event or its
                bytes are malformed.
        """
        alive: dict[Hashable, int] = {}
        begun: list[tuple[int, int]] = []
        stops: dict[int, int] = {}
        index = -1
        for index, event in enumerate(events):
            kind, key, num_bytes = _read_event(index, event)
            if kind == "alloc":
                if key in alive:
                    raise DataError(
                        f"event {index}: key {key!r} is allocated, but it has been alive since event "
                        f"{begun[alive[key]][0]}; free it first, or use another key"
                    )
                alive[key] = len(begun)
                begun.append((index, num_bytes))
            else:
                if key not in alive:
                    raise DataError(
                        f"event {index}: key {key!r} is freed, but it is not alive: it was freed "
                        "before, or never allocated"
                    )
                stops[alive.pop(key)] = index
        intervals = [
            (start, stops.get(number, index + 1), num_bytes)
            for number, (start, num_bytes) in enumerate(begun)
        ]
        return cls(intervals=tuple(intervals), dropped=dict(dropped or {}))

    @classmethod
    def from_csv(cls, path: str | Path) -> Trace:
        """A trace in MiniMalloc's form: columns `id`, `lower`, `upper`, `size`, in any order.

        An interval is alive in [lower, upper). Other columns are ignored.

        Raises:
            DataError: the file cannot be read, a column is missing, or a row has no whole numbers that 64 bits
                hold, or ends before it starts.
        """
        text = read_text(path, "intervals")
        try:
            reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
            names = [name.strip().lower() for name in reader.fieldnames or []]
            reader.fieldnames = names
            rows = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise DataError(f"{path}: expected intervals as CSV, got {error}; mend it") from error
        intervals = []
        if any(name not in names for name in _COLUMNS):
            raise DataError(
                f"{path}: expected columns id, lower, upper, size, got {names}; name them in the first line"
            )
        for line, row in rows:
            where = f"{path}, line {line}"
            try:
                lower, upper, size = (int(row[name]) for name in _COLUMNS)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: expected whole numbers, got {row}; mend it") from error
            if max(abs(lower), abs(upper), size) >= _LARGEST:
                raise DataError(f"{where}: expected numbers below 2^62, got {row}; mend it")
            if lower > upper or size < 0:
                raise DataError(
                    f"{where}: expected lower <= upper and size >= 0, got {row}; mend it"
                )
            intervals.append((lower, upper, size))
        return cls(intervals=tuple(sorted(intervals)), dropped={})

    @classmethod
    def from_cuda_snapshot(cls, path: str | Path, device: int | None = None) -> Trace:
        """A trace of the file that `torch.cuda.memory._dump_snapshot` writes.

        What the history frees without having allocated it (it began later, or its oldest entries were
        overwritten) is left out and counted in `dropped`.

        Args:
            path: the pickled snapshot; it is read without running any code in it.
            device: number of the device; may be left out if only one has a history.

        Raises:
            DataError: the file is no snapshot, holds other things than numbers, texts and containers,
                has no history, or has that of several devices and none was named; a block overlaps a live one, is
                freed twice or with another size.
        """
        from memo.planner.addresses.snapshot import read_events

        check_not_empty(path, "a CUDA memory snapshot")
        return cls.from_events(*read_events(Path(path), device))

    @classmethod
    def from_fake(cls, model: Any, batch: Any) -> Trace:
        """A trace of one training step that is not run: no tensor's memory is allocated.

        Forward and backward run on fake tensors, which have shapes and no values. Parameters,
        buffers and the batch are there before and are no part of the trace; gradients live to its end.
        Attention is the CPU's, which keeps no matrix of scores.

        Args:
            model: a module, on any device ("meta" needs no memory); it is left as it is. It returns a
                tensor, or an object with `.loss`.
            batch: its arguments: a mapping of keywords, or a tensor.

        Raises:
            DataError: the model returns neither, or nothing that depends on a parameter.
        """
        from memo.planner.addresses.fake_step import record_step

        return cls.from_events(record_step(model, batch))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each allocation."""
        return tuple(size for _, _, size in self.intervals)

    @cached_property
    def load_bytes(self) -> int:
        """The most bytes that are alive at once."""
        if not self.intervals:
            return 0
        start, stop, size = np.array(self.intervals, dtype=np.int64).T
        times, which = np.unique(np.concatenate([start, stop]), return_inverse=True)
        change = np.zeros(len(times), dtype=np.int64)
        np.add.at(change, which, np.concatenate([size, -size]))
        return int(change.cumsum().max())


def _read_event(index: int, event: Sequence[Any]) -> tuple[str, Hashable, int]:
    match event:
        case ("alloc", key, num_bytes):
            if isinstance(num_bytes, bool) or not isinstance(num_bytes, int | np.integer):
                raise DataError(
                    f"event {index}: expected whole bytes of {key!r}, got {num_bytes!r}"
                )
            if num_bytes < 0:
                raise DataError(
                    f"event {index}: expected bytes of {key!r} from 0, got {num_bytes!r}"
                )
            return "alloc", key, int(num_bytes)
        case ("free", key):
            return "free", key, 0
    raise DataError(
        f'event {index}: expected ("alloc", key, bytes) or ("free", key), got {event!r}'
    )
