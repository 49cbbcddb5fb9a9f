"""Temporal sampling in numba: each root looks its edges up and writes them in one pass.

A search fills four numbers a root, a copy follows them. One thread does both in one call; several
search their roots, learn from the counts where their neighbours go, and copy. A search begins where
the last one of the node ended, and falls back on the newest edge and on the directory, O(log degree).
"""

# ruff: noqa: ANN001, ANN202
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.philox.cpu import philox_words
from shared.kernels.rows import num_tasks, over_ranges, over_rows
from shared.kernels.temporal.adjacency import Adjacency

__all__ = ["count_before", "recent", "uniform"]

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_16 = np.uint64(16)
# How far from where a node's last query ended the next one is looked for edge by edge.
_STEPS = 4
# Parts of a kernel's work.
_SEARCH, _COPY = 1, 2
# What one root's search and one neighbour's copy touch.
_ROOT_BYTES = 256
_EDGE_BYTES = 60


@compiled
def _count_before(table, num_blocks, directory, since, times, node, bound):
    """How many edges of a node are earlier than a time."""
    count = table[node, 2]
    if count == 0:
        return count
    slot = table[node, 0]
    first = table[node, 1]
    if times[slot + count - first - 1] < bound:
        return count
    low = np.int64(0)
    high = count - first
    if not times[slot] < bound:
        # The last block before the newest that begins earlier than the bound.
        entry = table[node, 3]
        left = np.int64(0)
        right = np.int64(num_blocks[node] - 1)
        while left < right:
            middle = (left + right) >> 1
            if since[entry + middle] < bound:
                left = middle + 1
            else:
                right = middle
        if left == 0:
            return np.int64(0)
        slot = directory[entry + left - 1, 0]
        first = directory[entry + left - 1, 1]
        high = directory[entry + left, 1] - first
    while low < high:
        middle = (low + high) >> 1
        if times[slot + middle] < bound:
            low = middle + 1
        else:
            high = middle
    return first + low


@compiled
def _counts(table, num_blocks, directory, opened, times, bounds, counts, start, stop):
    for node in range(start, stop):
        counts[node] = _count_before(
            table, num_blocks, directory, opened, times, node, bounds[node]
        )


@compiled
def _block_of(table, num_blocks, directory, node, rank):
    """Which of a node's blocks has its edge of a rank; counted from its oldest."""
    last = np.int64(num_blocks[node] - 1)
    if rank >= table[node, 1]:
        return last
    entry = table[node, 3]
    left = np.int64(0)
    right = last - 1
    while left < right:
        middle = (left + right + 1) >> 1
        if directory[entry + middle, 1] <= rank:
            left = middle
        else:
            right = middle - 1
    return left


@compiled
def _recent(
    table,
    num_blocks,
    directory,
    opened,  # time of each block's oldest edge
    neighbors,
    times,
    eids,
    hints,
    roots,
    root_times,
    before,
    since,  # empty: no beginning
    fanout,
    found,  # rank after the last, how many, and the last one's slot and block; -1: the newest
    nodes_out,
    times_out,
    dt_out,
    eids_out,
    row_out,
    start,
    stop,
    out,
    parts,
):
    # One function, since numba passes arrays to another one by copying their descriptions, which takes
    # longer than the search; indices without sign, since others are looked at first. All searches
    # come before all copies, so that what one root misses in the caches another does not wait for.
    total = np.int64(0)
    for root in range(start, stop if parts & _SEARCH else start):
        node = roots[root]
        place = np.uint64(root)
        found[place, 1] = 0
        if node < 0 or node >= table.shape[0]:
            continue
        at = np.uint64(node)
        count = table[at, 2]
        if count == 0:
            continue
        bound = before[root]
        slot = table[at, 0]
        first = table[at, 1]
        # Queries of a node tend to follow one another in time: the search starts where the last one
        # ended, and looks at nothing but the edges there while these are of the newest block. The
        # hint is checked, so that it may say anything.
        low = hints[at, 0]
        is_found = False
        if first <= low <= count:
            base = slot - first
            stop_at = min(count, low + _STEPS)
            while low < stop_at and times[np.uint64(base + low)] < bound:
                low += 1
            at_end = low == count or not times[np.uint64(base + low)] < bound
            is_found = at_end and low > first and times[np.uint64(base + low - 1)] < bound
        block = np.int64(-1)
        if is_found:
            pass
        elif times[np.uint64(slot + count - first - 1)] < bound:
            low = count
        else:
            newest = np.int64(num_blocks[at]) - 1
            entry = table[at, 3]
            block = min(max(hints[at, 1], np.int64(0)), newest)
            is_block = block == 0 or opened[np.uint64(entry + block)] < bound
            if is_block and block < newest:
                is_block = not opened[np.uint64(entry + block + 1)] < bound
            if not is_block:
                left = np.int64(0)
                right = newest
                while left < right:
                    middle = (left + right + 1) >> 1
                    if opened[np.uint64(entry + middle)] < bound:
                        left = middle
                    else:
                        right = middle - 1
                block = left
            end = count
            if block < newest:
                slot = directory[np.uint64(entry + block), 0]
                first = directory[np.uint64(entry + block), 1]
                end = directory[np.uint64(entry + block + 1), 1]
            low = first
            high = end
            hint = hints[at, 0]
            if is_block and first <= hint <= end:
                base = slot - first
                step = np.int64(1)
                if hint < end and times[np.uint64(base + hint)] < bound:
                    low = hint + 1
                    high = hint + 1
                    while high < end and times[np.uint64(base + high)] < bound:
                        low = high + 1
                        high += step
                        step <<= 1
                    high = min(high, end)
                elif hint > first and not times[np.uint64(base + hint - 1)] < bound:
                    low = hint - 1
                    high = hint - 1
                    while low > first and not times[np.uint64(base + low - 1)] < bound:
                        high = low - 1
                        low -= step
                        step <<= 1
                    low = max(low, first)
                    high = max(high, low)
                else:
                    low = hint
                    high = hint
            while low < high:
                middle = (low + high) >> 1
                if times[np.uint64(slot + middle - first)] < bound:
                    low = middle + 1
                else:
                    high = middle
            hints[at, 1] = block
        hints[at, 0] = low
        num_found = min(low, fanout)
        if since.size and num_found:
            oldest = _count_before(table, num_blocks, directory, opened, times, node, since[root])
            num_found = max(np.int64(0), min(num_found, low - oldest))
        found[place, 0] = low
        found[place, 1] = num_found
        found[place, 2] = slot + low - first - 1
        found[place, 3] = block
        total += num_found
    if not parts & _COPY:
        return total
    for root in range(start, stop):
        place = np.uint64(root)
        left = found[place, 1]
        if left == 0:
            continue
        end = found[place, 0]
        source = np.uint64(found[place, 2])
        block = found[place, 3]
        root_time = root_times[place]
        at = np.uint64(roots[place])
        first = table[at, 1]
        if block >= 0:
            first = directory[np.uint64(table[at, 3] + block), 1]
        while True:
            here = min(left, end - first)
            target = np.uint64(out)
            for offset in range(np.uint64(here)):
                time = times[source - offset]
                nodes_out[target + offset] = neighbors[source - offset]
                times_out[target + offset] = time
                dt_out[target + offset] = root_time - time
                eids_out[target + offset] = eids[source - offset]
                row_out[target + offset] = root
            out += here
            left -= here
            if left == 0:
                break
            if block < 0:
                block = np.int64(num_blocks[at]) - 1
            block -= 1
            entry = np.uint64(table[at, 3] + block)
            end = first
            first = directory[entry, 1]
            source = np.uint64(directory[entry, 0] + end - first - 1)
    return total


@compiled
def _draw(node, bits, number, limit, k0, k1):
    """A number in [0, limit), of a root's own stream; limit < 2^31."""
    call = np.uint64(number >> 1)
    w0, w1, w2, w3 = philox_words(
        node & _MASK, ((node >> _32) & np.uint64(0xFFFF)) | (call << _16), bits & _MASK,
        bits >> _32, k0, k1,
    )  # fmt: skip
    low, high = (w2, w3) if number & 1 else (w0, w1)
    size = np.uint64(limit)
    return np.int64((high * size + ((low * size) >> _32)) >> _32)


@compiled
def _uniform(
    table,
    num_blocks,
    directory,
    opened,
    neighbors,
    times,
    eids,
    roots,
    root_times,
    before,
    since,
    fanout,
    replace,
    k0,
    k1,
    found,  # rank of the first to draw from, and how many there are
    nodes_out,
    times_out,
    dt_out,
    eids_out,
    row_out,
    start,
    stop,
    out,
    parts,
):
    total = np.int64(0)
    for root in range(start, stop if parts & _SEARCH else start):
        node = roots[root]
        found[root, 1] = 0
        if node < 0 or node >= table.shape[0]:
            continue
        end = _count_before(table, num_blocks, directory, opened, times, node, before[root])
        begin = np.int64(0)
        if since.size:
            begin = _count_before(table, num_blocks, directory, opened, times, node, since[root])
        found[root, 0] = begin
        found[root, 1] = max(np.int64(0), end - begin)
        if end > begin:
            total += fanout if replace else min(np.int64(fanout), end - begin)
    if not parts & _COPY:
        return total
    picked = np.empty(fanout, np.int64)
    bits_of = root_times.view(np.uint64)
    for root in range(start, stop):
        size = found[root, 1]
        if size == 0:
            continue
        node = roots[root]
        count = np.int64(fanout)
        if not replace and size <= fanout:
            count = size
        root_time = root_times[root]
        for number in range(count):
            if replace:
                drawn = _draw(np.uint64(node), bits_of[root], number, size, k0, k1)
            elif size <= fanout:
                drawn = size - 1 - number
            else:
                # Floyd's algorithm: the new last one in place of one that was drawn already.
                last = size - fanout + number
                drawn = _draw(np.uint64(node), bits_of[root], number, last + 1, k0, k1)
                for other in range(number):
                    if picked[other] == drawn:
                        drawn = last
                        break
                picked[number] = drawn
            rank = found[root, 0] + drawn
            if rank >= table[node, 1]:
                place = table[node, 0] + rank - table[node, 1]
            else:
                entry = table[node, 3] + _block_of(table, num_blocks, directory, node, rank)
                place = directory[entry, 0] + rank - directory[entry, 1]
            time = times[place]
            nodes_out[out] = neighbors[place]
            times_out[out] = time
            dt_out[out] = root_time - time
            eids_out[out] = eids[place]
            row_out[out] = root
            out += 1
    return total


def count_before(adjacency: Adjacency, bounds: Tensor) -> Tensor:
    """How many edges of each node are earlier than the node's bound, int64 [num_nodes]."""
    counts = torch.empty(adjacency.num_nodes, dtype=torch.int64)
    columns = [
        tensor.numpy()
        for tensor in (
            adjacency.table,
            adjacency.num_blocks,
            adjacency.directory,
            adjacency.since,
            adjacency.times,
            bounds,
            counts,
        )
    ]
    over_rows(partial(_counts, *columns), len(counts), _ROOT_BYTES * len(counts))
    return counts


def recent(
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
) -> Found:
    """The newest edges of each root: neighbours, times, ages, edge ids and positions of roots."""
    return _run(_recent, adjacency, roots, root_times, before, since, fanout, (), has_hints=True)


def uniform(
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
    replace: bool,
    key: int,
) -> Found:
    """Edges of each root drawn at random; without replacement by Floyd's algorithm."""
    options = (replace, np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32))
    return _run(_uniform, adjacency, roots, root_times, before, since, fanout, options)


def _run(
    kernel,
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
    options: tuple,
    has_hints: bool = False,
):
    columns = adjacency.arrays
    if has_hints:
        columns = (*columns, adjacency.hints)
    bounds = root_times.numpy()
    times = bounds if before is root_times else before.numpy()
    ends = bounds[:0] if since is None else since.numpy()
    num_roots = len(bounds)
    found = np.empty((num_roots, 4), np.int64)
    queries = (*columns, roots.numpy(), bounds, times, ends, fanout, *options, found)
    tasks = num_tasks(num_roots * (_ROOT_BYTES + fanout * _EDGE_BYTES))
    if tasks == 1:
        outputs = _outputs(num_roots * fanout, bounds.dtype)
        end = kernel(*queries, *outputs, 0, num_roots, 0, _SEARCH | _COPY)
        return _tensors(outputs, end)
    cuts = [num_roots * task // tasks for task in range(tasks + 1)]
    counts: dict[int, int] = {}
    nothing = _outputs(0, bounds.dtype)

    def search(start: int, stop: int) -> None:
        counts[start] = kernel(*queries, *nothing, start, stop, 0, _SEARCH)

    over_ranges(search, cuts)
    ends_at = list(accumulate(counts[start] for start in cuts[:-1]))
    places = dict(zip(cuts, [0, *ends_at], strict=True))
    outputs = _outputs(ends_at[-1], bounds.dtype)

    def copy(start: int, stop: int) -> None:
        kernel(*queries, *outputs, start, stop, places[start], _COPY)

    over_ranges(copy, cuts)
    return _tensors(outputs, ends_at[-1])


def _outputs(size: int, time_dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """Neighbours, times, ages, edge ids and positions of roots, yet to be written."""
    kinds = (np.int64, time_dtype, time_dtype, np.int64, np.int64)
    return tuple([np.empty(size, kind) for kind in kinds])


def _tensors(outputs: tuple[np.ndarray, ...], end: int) -> Found:
    # Arrays are cut in a fraction of the time that tensors take.
    nodes, times, dt, eids, row = [torch.from_numpy(values[:end]) for values in outputs]
    return nodes, times, dt, eids, row
