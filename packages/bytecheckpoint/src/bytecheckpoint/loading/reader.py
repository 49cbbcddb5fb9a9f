"""Reads the boxes that a rank wants: only the bytes needed, in few large reads, each used once.

The wanted boxes become intervals of bytes; intervals grow to whole checksum blocks, near ones are
joined, and long ones are cut into units that several threads read. The part of a chunk in a unit is
a range of the chunk's flat order, hence a few boxes (`decompose`), each contiguous in the buffer.
Blocks are verified, and then the wanted parts are copied from the buffer.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bytecheckpoint.loading.source import Source
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import BLOCK_BYTES, Index
from shared.topology.boxes import Box, decompose, intersect

__all__ = [
    "Unit",
    "Want",
    "copy_parts",
    "find_held_boxes",
    "list_wants",
    "match_parts",
    "plan_units",
    "read_units",
]

# Largest read, and number of parallel reads, by whether the storage is a file system: requests to
# an object store have a long latency, and many at once do not slow each other down.
UNIT_BYTES = {True: 16 * 1024 * 1024, False: 8 * 1024 * 1024}
NUM_THREADS = {True: 2, False: 8}

# Gap in bytes up to which two ranges are read as one, because another read costs more.
_GAP_BYTES = {True: 64 * 1024, False: 4 * 1024 * 1024}


class Want(NamedTuple):
    """A part of a chunk that is copied to one destination.

    Attributes:
        row: row of the chunk in the index.
        box: the part, in the tensor's global index space.
        place: position of the destination in its list.
    """

    row: int
    box: Box
    place: int


class Unit(NamedTuple):
    """One read.

    Attributes:
        file: position of the file in the index.
        start, stop: range of bytes in the file.
        wants: positions of the wants with elements in that range.
    """

    file: int
    start: int
    stop: int
    wants: list[int]


def list_wants(index: Index, places: Iterable[tuple[str, Box]]) -> list[Want]:
    """The parts of chunks that make up boxes of tensors.

    Args:
        index: index of the checkpoint.
        places: names and boxes, in the order of their positions.
    """
    return [
        Want(row, part, at)
        for at, (name, box) in enumerate(places)
        for row, part in index.overlapping(name, box)
    ]


def plan_units(source: Source, wants: Sequence[Want]) -> list[Unit]:
    """The reads that cover all wants, in the order of files and bytes.

    Args:
        source: of the checkpoint; files with checksums are read in whole blocks.
        wants: parts of chunks.
    """
    by_file: dict[int, list[tuple[int, int, int]]] = {}
    index = source.index
    _, files, starts, itemsizes = index.columns
    gap = _GAP_BYTES[source.storage.has_rename]
    for at, (row, part, _) in enumerate(wants):
        file, start, itemsize = files[row], starts[row], itemsizes[row]
        found = by_file.setdefault(file, [])
        chunk = index.box(row)
        if part == chunk:
            found.append((start, start + chunk.numel * itemsize, at))
            continue
        gap_here = max(gap, BLOCK_BYTES) if source.has_checksums(file) else gap
        for first, last in _merge_intervals(chunk, part, gap_here // itemsize):
            found.append((start + first * itemsize, start + last * itemsize, at))
    return [
        unit
        for file, found in sorted(by_file.items())
        for unit in _make_units(source, file, sorted(found), gap)
    ]


def _merge_intervals(chunk: Box, part: Box, gap: int) -> Iterator[tuple[int, int]]:
    """Ranges of the chunk's flat order that hold a part of it; near ones are joined.

    Args:
        chunk: box of the whole chunk.
        part: box inside the chunk.
        gap: largest number of elements between two ranges that are read as one.
    """
    ndim = len(chunk.sizes)
    strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(ndim)]
    begin = [p - c for p, c in zip(part.offsets, chunk.offsets, strict=True)]
    first = sum(b * s for b, s in zip(begin, strides, strict=True))
    # The outermost dimension along which the gaps between the part's pieces are worth skipping.
    for d in range(ndim):
        inner = 1 + sum((part.sizes[e] - 1) * strides[e] for e in range(d + 1, ndim))
        if part.sizes[d] > 1 and strides[d] - inner > gap:
            for at in range(part.sizes[d]):
                offsets = (*part.offsets[:d], part.offsets[d] + at, *part.offsets[d + 1 :])
                sizes = (*part.sizes[:d], 1, *part.sizes[d + 1 :])
                yield from _merge_intervals(chunk, Box(offsets, sizes), gap)
            return
    span = 1 + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))
    yield first, first + span


def _make_units(
    source: Source, file: int, intervals: list[tuple[int, int, int]], gap: int
) -> Iterator[Unit]:
    hashed = source.index.files[file].hashed_bytes if source.has_checksums(file) else None
    ranges: list[list[int]] = []
    for start, stop, _ in intervals:
        if hashed is not None:
            start = start // BLOCK_BYTES * BLOCK_BYTES
            stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, hashed)
        if ranges and start <= ranges[-1][1] + gap:
            ranges[-1][1] = max(ranges[-1][1], stop)
        else:
            ranges.append([start, stop])
    units: list[tuple[int, int]] = []
    for start, stop in ranges:
        cuts = [start, *_list_cuts(source, file, start, stop), stop]
        units += [(a, b) for a, b in pairwise(cuts) if a < b]
    begins = [start for start, _ in units]
    # Dictionaries, because a want of many intervals may meet a unit many times.
    inside: list[dict[int, None]] = [{} for _ in units]
    for start, stop, want in intervals:
        at = bisect_right(begins, start) - 1
        while at < len(units) and begins[at] < stop:
            inside[at][want] = None
            at += 1
    for (start, stop), wants in zip(units, inside, strict=True):
        yield Unit(file, start, stop, list(wants))


def _list_cuts(source: Source, file: int, start: int, stop: int) -> Iterator[int]:
    """Positions to cut a long range at: between elements, and between blocks with checksums."""
    unit_bytes = UNIT_BYTES[source.storage.has_rename]
    if source.has_checksums(file):
        # Blocks begin at multiples of every item size, and so do our chunks.
        yield from range(start + unit_bytes, stop, unit_bytes)
        return
    if stop - start <= unit_bytes:
        return
    index = source.index
    rows = (index.file == file) & (index.start < stop) & (index.start + index.num_bytes > start)
    at = start
    for row in sorted(rows.nonzero()[0].tolist(), key=lambda row: int(index.start[row])):
        begin, num_bytes = int(index.start[row]), int(index.num_bytes[row])
        while begin + num_bytes - at > unit_bytes:
            # A multiple of every item size: cuts keep the distance from the chunk's start.
            at = begin + ((at - begin) // unit_bytes + 1) * unit_bytes if at >= begin else begin
            if start < at < stop:
                yield at
            if at >= stop:
                return


def find_held_boxes(
    source: Source, unit: Unit, row: int, buffer: Tensor
) -> list[tuple[Box, Tensor]]:
    """The part of a chunk that a unit holds, as boxes and views of the unit's buffer.

    Args:
        source: of the checkpoint.
        unit: the unit that was read into the buffer.
        row: the chunk.
        buffer: uint8 [bytes of the unit].
    """
    index = source.index
    tensors, _, starts, itemsizes = index.columns
    dtype, itemsize = parse_dtype(index.dtypes[tensors[row]]), itemsizes[row]
    chunk, begin = index.box(row), starts[row]
    first = max(0, -(-(unit.start - begin) // itemsize))
    last = min(chunk.numel, (unit.stop - begin) // itemsize)
    if first >= last:
        return []
    values = _view_typed(buffer, begin + first * itemsize - unit.start, (last - first), dtype)
    if last - first == chunk.numel:
        return [(chunk, values.view(chunk.sizes))]
    found, at = [], 0
    for box in decompose(chunk.sizes, first, last):
        offsets = tuple(o + c for o, c in zip(box.offsets, chunk.offsets, strict=True))
        found.append((Box(offsets, box.sizes), values[at : at + box.numel].view(box.sizes)))
        at += box.numel
    return found


def _view_typed(buffer: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    values = buffer[start : start + numel * dtype.itemsize]
    if start % dtype.itemsize:
        values = values.clone()  # other formats do not align their elements
    return values.view(dtype)


def read_units(
    source: Source,
    units: Sequence[Unit],
    use: Callable[[Unit, Tensor], None],
    trace: Trace,
    num_threads: int | None = None,
) -> None:
    """Reads and verifies units, and passes each to `use`, on several threads.

    Args:
        source: the checkpoint.
        units: the units to read.
        use: called with a unit and its bytes; the buffer is reused after the call.
        trace: trace of the load.
        num_threads: number of units read in parallel; None: chosen by kind of storage.

    Raises:
        DataError: a block is damaged; `use` may have been called for other units before.
    """
    num_threads = num_threads or NUM_THREADS[source.storage.has_rename]
    largest = UNIT_BYTES[source.storage.has_rename]
    buffers = threading.local()

    def read(unit: Unit) -> None:
        size = unit.stop - unit.start
        if getattr(buffers, "bytes", None) is None or len(buffers.bytes) < size:
            buffers.bytes = torch.empty(max(size, min(largest, 4 * size)), dtype=torch.uint8)
        buffer = buffers.bytes[:size]
        with trace.span("read", size):
            source.read(unit.file, unit.start, buffer.numpy().data)
        with torch.no_grad():  # grad mode is per thread
            use(unit, buffer)

    if len(units) <= 1 or num_threads == 1:
        for unit in units:
            read(unit)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        waiting = [threads.submit(read, unit) for unit in units]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def match_parts(
    held: list[tuple[Box, Tensor]], want: Want, destination: Box, place: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a destination that the given boxes hold: target and values of each."""
    for box, values in held:
        part = box if box == want.box else intersect(box, want.box)
        if part is not None:
            target = place if part == destination else place[part.within(destination)]
            yield target, values if part == box else values[part.within(box)]


def copy_parts(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies values to their targets, thousands of small ones in one call."""
    pairs = list(parts)
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [values for _, values in pairs])
