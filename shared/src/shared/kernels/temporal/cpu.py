"""Temporal sampling in numba: each root looks its edges up and writes them in one pass.

One thread writes densely. Several write where their first root's neighbours would begin if every
root had all of them, and close the gaps afterwards. Queries of the present, most of them, touch a
line of the node table and the newest block; older ones search on from where the last query of the
node ended, or the directory, O(log degree).
"""

# ruff: noqa: ANN001, ANN202
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shared.kernels._jit import compiled
from shared.kernels._rows import num_tasks, over_ranges, over_rows
from shared.kernels.philox.cpu import philox_words
from shared.kernels.temporal.adjacency import Adjacency

__all__ = ["count_before", "recent", "uniform"]

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_16 = np.uint64(16)
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
    nodes_out,
    times_out,
    dt_out,
    eids_out,
    row_out,
    start,
    stop,
):
    # One function, since numba passes arrays to another one by copying their descriptions, which takes
    # longer than the search; indices without sign, since others are looked at first. All searches
    # come before all copies, so that what one root misses in the caches another does not wait for.
    found = np.empty((stop - start, 4), np.int64)  # rank after the last, block, its slot and rank
    for root in range(start, stop):
        node = roots[root]
        place = np.uint64(root - start)
        found[place, 0] = 0
        if node < 0 or node >= table.shape[0]:
            continue
        at = np.uint64(node)
        count = table[at, 2]
        if count == 0:
            continue
        bound = before[root]
        slot = table[at, 0]
        first = table[at, 1]
        newest = np.int64(num_blocks[at]) - 1
        block = newest
        low = count
        if not times[np.uint64(slot + count - first - 1)] < bound:
            # Queries of a node tend to follow one another in time: the search starts where the last
            # one ended, and doubles its steps. The hint is checked, so that it may say anything.
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
            hints[at, 0] = low
            hints[at, 1] = block
        found[place, 0] = low
        found[place, 1] = block
        found[place, 2] = slot
        found[place, 3] = first
    out = start * fanout
    for root in range(start, stop):
        place = np.uint64(root - start)
        end = found[place, 0]
        if end == 0:
            continue
        begin = max(np.int64(0), end - fanout)
        if since.size:
            oldest = _count_before(
                table, num_blocks, directory, opened, times, roots[root], since[root]
            )
            begin = max(begin, oldest)
        block = found[place, 1]
        slot = found[place, 2]
        first = found[place, 3]
        root_time = root_times[root]
        while end > begin:
            low = max(begin, first)
            source = np.uint64(slot + end - first - 1)
            target = np.uint64(out)
            for offset in range(np.uint64(max(np.int64(0), end - low))):
                time = times[source - offset]
                nodes_out[target + offset] = neighbors[source - offset]
                times_out[target + offset] = time
                dt_out[target + offset] = root_time - time
                eids_out[target + offset] = eids[source - offset]
                row_out[target + offset] = root
            out += end - low
            end = low
            if end > begin:
                block -= 1
                entry = np.uint64(table[roots[root], 3] + block)
                slot = directory[entry, 0]
                first = directory[entry, 1]
    return out - start * fanout


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
    nodes_out,
    times_out,
    dt_out,
    eids_out,
    row_out,
    start,
    stop,
):
    at = start * fanout
    picked = np.empty(fanout, np.int64)
    bits_of = root_times.view(np.uint64)
    for root in range(start, stop):
        node = roots[root]
        if node < 0 or node >= table.shape[0]:
            continue
        end = _count_before(table, num_blocks, directory, opened, times, node, before[root])
        begin = np.int64(0)
        if since.size:
            begin = _count_before(table, num_blocks, directory, opened, times, node, since[root])
        size = end - begin
        if size <= 0:
            continue
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
            rank = begin + drawn
            if rank >= table[node, 1]:
                place = table[node, 0] + rank - table[node, 1]
            else:
                entry = table[node, 3] + _block_of(table, num_blocks, directory, node, rank)
                place = directory[entry, 0] + rank - directory[entry, 1]
            time = times[place]
            nodes_out[at] = neighbors[place]
            times_out[at] = time
            dt_out[at] = root_time - time
            eids_out[at] = eids[place]
            row_out[at] = root
            at += 1
    return at - start * fanout


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
    queries = (roots.numpy(), bounds, times, ends, fanout, *options)
    most = len(roots) * fanout
    longs = torch.empty(3, most, dtype=torch.int64)
    stamps = torch.empty(2, most, dtype=root_times.dtype)
    nodes, eids, row = longs.unbind()
    when, dt = stamps.unbind()
    outputs = [tensor.numpy() for tensor in (nodes, when, dt, eids, row)]
    tasks = num_tasks(len(roots) * (_ROOT_BYTES + fanout * _EDGE_BYTES))
    if tasks == 1:
        end = kernel(*columns, *queries, *outputs, 0, len(roots))
    else:
        written: dict[int, int] = {}

        def run(start: int, stop: int) -> None:
            written[start] = kernel(*columns, *queries, *outputs, start, stop)

        over_ranges(run, [len(roots) * task // tasks for task in range(tasks + 1)])
        end = written[0]
        for start, count in sorted(written.items())[1:]:
            for values in outputs:
                # Towards the front: what is read last is not written before.
                values[end : end + count] = values[start * fanout : start * fanout + count]
            end += count
    return nodes[:end], when[:end], dt[:end], eids[:end], row[:end]
