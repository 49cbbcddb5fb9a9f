"""Insertion, expiry and packing of the blocks that store a node's edges, in numba.

A node's edges are stored in blocks, oldest first; only its newest block may have free slots. A
batch opens at most one block per node, as large as the node's degree (GNNFlow's adaptive sizes).
The directory lists a node's blocks in one region of entries, which moves to a larger one when full.
Freed blocks and regions go to free lists by size (the link is in the first slot's time, or in the
first entry) and are reused. Nothing here can fail: a batch's demand is counted first, and the
caller allocates it.
"""

# ruff: noqa: ANN001, ANN201, ANN202
import numpy as np

from shared.kernels.jit import compiled

__all__ = ["MAX_CHAINED", "check", "drop", "insert", "pack", "region_size"]

# Free blocks above this size are not reused, but reclaimed by the next packing.
MAX_CHAINED = 4096

# Columns of the node table, of `numbers` (of each node), and of `totals`.
_SLOT, _BEFORE, _COUNT, _ENTRY = range(4)
_ROOM, _SKIPPED, _REGION = range(3)
_SLOTS_END, _ENTRIES_END, _FREE_SLOTS, _NUM_BLOCKS = range(4)
# Columns of `batch`: a node, its edges still to be written from the next slot on, that slot, the
# first slot of the block opened for the rest or -1, and its edges before the batch.
_NODE, _NEW, _NEXT, _OPENED, _HAD = range(5)


@compiled
def check(src, dst, times, limit):
    """The first bad row and the reason (0 none, 1 source, 2 destination, 3 time), whether times are
    sorted, and the largest id.
    """
    largest = np.int64(-1)
    is_sorted = True
    last = times[0] if len(times) else np.zeros(1, times.dtype)[0]
    for at in range(len(src)):
        if src[at] < 0 or src[at] >= limit:
            return at, 1, is_sorted, largest
        if dst[at] < 0 or dst[at] >= limit:
            return at, 2, is_sorted, largest
        time = times[at]
        # Of infinities and NaN the difference is NaN.
        if not (time >= 0 and time - time == 0):
            return at, 3, is_sorted, largest
        is_sorted = is_sorted and time >= last
        last = time
        largest = max(largest, src[at], dst[at])
    return np.int64(-1), 0, is_sorted, largest


@compiled
def region_size(kind):
    """Entries of a directory region: 1, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    return ((2 + (kind & 1)) << (kind >> 1)) >> 1


@compiled
def _capacity(smallest, largest, num_new, degree):
    """Slots of the block opened for `num_new` edges of a node of `degree`."""
    if degree < largest:
        return max(num_new, degree, smallest)
    return (num_new + largest - 1) // largest * largest


@compiled
def _demand(src, dst, undirected, table, num_blocks, numbers, rank, batch, smallest, largest):  # fmt: skip
    """Counts a batch's edges by node, and bounds the memory they need.

    Args:
        rank: int32 [num_nodes], zeros; receives each node's row of `batch`, counted from 1.
        batch: int64 [nodes, 5], scratch; its first two columns are written.

    Returns:
        Number of nodes touched, and the most new slots and new directory entries needed.
    """
    num_touched = np.int64(0)
    for at in range(len(src)):
        for turn in range(2):
            node = src[at] if turn == 0 else dst[at]
            if turn == 1 and (not undirected or src[at] == dst[at]):
                break
            row = rank[node]
            if row == 0:
                batch[num_touched, _NODE] = node
                batch[num_touched, _NEW] = 1
                num_touched += 1
                rank[node] = num_touched
            else:
                batch[row - 1, _NEW] += 1
    slots = np.int64(0)
    entries = np.int64(0)
    for row in range(num_touched):
        node = batch[row, _NODE]
        rest = batch[row, _NEW] - numbers[node, _ROOM]
        if rest > 0:
            degree = table[node, _COUNT] + numbers[node, _ROOM]
            slots += _capacity(smallest, largest, rest, degree)
            kind = numbers[node, _REGION]
            if num_blocks[node] == 0 or num_blocks[node] == region_size(kind):
                entries += region_size(kind + 2)
    return num_touched, slots, entries


@compiled
def _take_slots(capacity, times_bits, chains, totals):
    if capacity <= MAX_CHAINED and chains[capacity] >= 0:
        slot = chains[capacity]
        chains[capacity] = times_bits[slot]
        totals[_FREE_SLOTS] -= capacity
        return slot
    slot = totals[_SLOTS_END]
    totals[_SLOTS_END] += capacity
    return slot


@compiled
def _give_slots(slot, capacity, times_bits, chains, totals):
    totals[_FREE_SLOTS] += capacity
    if capacity <= MAX_CHAINED:
        times_bits[slot] = chains[capacity]
        chains[capacity] = slot


@compiled
def _take_region(kind, directory, region_chains, totals):
    if region_chains[kind] >= 0:
        entry = region_chains[kind]
        region_chains[kind] = directory[entry, 0]
        return entry
    entry = totals[_ENTRIES_END]
    totals[_ENTRIES_END] += region_size(kind)
    return entry


@compiled
def _open_block(node, capacity, table, num_blocks, numbers, directory, since, times_bits, chains,
                region_chains, totals):  # fmt: skip
    """Appends a newest block to a node; `table` counts the node's edges before it."""
    blocks = num_blocks[node]
    kind = numbers[node, _REGION]
    if blocks == 0:
        kind = np.int32(1)
        table[node, _ENTRY] = _take_region(kind, directory, region_chains, totals)
        numbers[node, _REGION] = kind
    elif blocks == region_size(kind):
        old = table[node, _ENTRY]
        new = _take_region(kind + 1, directory, region_chains, totals)
        for at in range(blocks):
            directory[new + at, 0] = directory[old + at, 0]
            directory[new + at, 1] = directory[old + at, 1]
            since[new + at] = since[old + at]
        directory[old, 0] = region_chains[kind]
        region_chains[kind] = old
        table[node, _ENTRY] = new
        numbers[node, _REGION] = kind + 1
    slot = _take_slots(capacity, times_bits, chains, totals)
    entry = table[node, _ENTRY] + blocks
    directory[entry, 0] = slot
    directory[entry, 1] = table[node, _COUNT]
    table[node, _SLOT] = slot
    table[node, _BEFORE] = table[node, _COUNT]
    num_blocks[node] = blocks + 1
    totals[_NUM_BLOCKS] += 1
    return slot


@compiled
def insert(src, dst, new_times, new_eids, undirected, table, num_blocks, numbers, directory, since,
           neighbors, times, eids, rank, batch, chains, region_chains, totals, smallest, largest,
           may_be_late):  # fmt: skip
    """Stores a batch, sorted by time, if there is room for it.

    Args:
        rank: int32 [num_nodes], zeros, and zeros again afterwards.
        batch: int64 [min(num_nodes, 2 x edges), 5], scratch; receives in its first column the nodes
            touched and in its last how many edges each had before.
        may_be_late: whether an edge may be older than one that its node already has.

    Returns:
        Number of nodes touched, and the lengths that slabs and directory must have; if one is
        shorter, nothing has changed.
    """
    num_touched, slots, entries = _demand(
        src, dst, undirected, table, num_blocks, numbers, rank, batch, smallest, largest
    )
    slots += totals[_SLOTS_END]
    entries += totals[_ENTRIES_END]
    if slots > len(times) or entries > len(directory):
        for row in range(num_touched):
            rank[batch[row, _NODE]] = 0
        return num_touched, slots, entries
    times_bits = times.view(np.int64)
    for row in range(num_touched):
        node = batch[row, _NODE]
        num_new = batch[row, _NEW]
        count = table[node, _COUNT]
        room = np.int64(numbers[node, _ROOM])
        into_old = min(room, num_new)
        batch[row, _NEXT] = table[node, _SLOT] + count - table[node, _BEFORE]
        batch[row, _NEW] = into_old
        batch[row, _OPENED] = -1
        batch[row, _HAD] = count
        table[node, _COUNT] = count + into_old
        numbers[node, _ROOM] = room - into_old
        if num_new > into_old:
            rest = num_new - into_old
            capacity = _capacity(smallest, largest, rest, count + into_old)
            batch[row, _OPENED] = _open_block(
                node, capacity, table, num_blocks, numbers, directory, since, times_bits, chains,
                region_chains, totals,
            )  # fmt: skip
            table[node, _COUNT] += rest
            numbers[node, _ROOM] = capacity - rest
    for at in range(len(src)):
        for turn in range(2):
            node = src[at] if turn == 0 else dst[at]
            other = dst[at] if turn == 0 else src[at]
            if turn == 1 and (not undirected or node == other):
                break
            row = rank[node] - 1
            if batch[row, _NEW] == 0:
                batch[row, _NEXT] = batch[row, _OPENED]
            batch[row, _NEW] -= 1
            slot = batch[row, _NEXT]
            batch[row, _NEXT] = slot + 1
            neighbors[slot] = other
            times[slot] = new_times[at]
            eids[slot] = new_eids[at]
    for row in range(num_touched):
        node = batch[row, _NODE]
        rank[node] = 0
        if batch[row, _OPENED] >= 0:
            since[table[node, _ENTRY] + num_blocks[node] - 1] = times[table[node, _SLOT]]
        if may_be_late and batch[row, _HAD] > 0:
            _merge(
                node, batch[row, _HAD], table, num_blocks, directory, since, neighbors, times, eids
            )
    return num_touched, slots, entries


@compiled
def _slot_of(node, rank, table, num_blocks, directory):
    """The slot of a node's edge number `rank`, counted from its oldest."""
    left = np.int64(0)
    right = np.int64(num_blocks[node] - 1)
    entry = table[node, _ENTRY]
    while left < right:
        middle = (left + right + 1) >> 1
        if directory[entry + middle, 1] <= rank:
            left = middle
        else:
            right = middle - 1
    return directory[entry + left, 0] + rank - directory[entry + left, 1]


@compiled
def _merge(node, num_old, table, num_blocks, directory, since, neighbors, times, eids):
    """Merges a node's new edges, sorted after its old ones, into the order of time.

    Starts at the newest, so that no edge older than the oldest new one is moved; at equal times old
    edges stay first.
    """
    first_new = _slot_of(node, num_old, table, num_blocks, directory)
    if times[_slot_of(node, num_old - 1, table, num_blocks, directory)] <= times[first_new]:
        return
    num_new = table[node, _COUNT] - num_old
    own_neighbors = np.empty(num_new, neighbors.dtype)
    own_times = np.empty(num_new, times.dtype)
    own_eids = np.empty(num_new, eids.dtype)
    for at in range(num_new):
        slot = _slot_of(node, num_old + at, table, num_blocks, directory)
        own_neighbors[at] = neighbors[slot]
        own_times[at] = times[slot]
        own_eids[at] = eids[slot]
    old = num_old - 1
    new = num_new - 1
    target = table[node, _COUNT] - 1
    while new >= 0:
        slot = _slot_of(node, target, table, num_blocks, directory)
        source = np.int64(-1)
        if old >= 0:
            source = _slot_of(node, old, table, num_blocks, directory)
        if source >= 0 and times[source] > own_times[new]:
            neighbors[slot] = neighbors[source]
            times[slot] = times[source]
            eids[slot] = eids[source]
            old -= 1
        else:
            neighbors[slot] = own_neighbors[new]
            times[slot] = own_times[new]
            eids[slot] = own_eids[new]
            new -= 1
        target -= 1
    for entry in range(table[node, _ENTRY], table[node, _ENTRY] + num_blocks[node]):
        since[entry] = times[directory[entry, 0]]


@compiled
def drop(counts, table, num_blocks, numbers, directory, since, neighbors, times, chains,
         region_chains, totals):  # fmt: skip
    """Frees the oldest `counts[node]` edges of every node.

    Returns:
        Number of edges freed, and how many of them are self-loops.
    """
    times_bits = times.view(np.int64)
    dropped = np.int64(0)
    loops = np.int64(0)
    for node in range(len(counts)):
        num_old = counts[node]
        if num_old == 0:
            continue
        dropped += num_old
        entry = table[node, _ENTRY]
        blocks = np.int64(num_blocks[node])
        gone = np.int64(0)
        left = num_old
        while left > 0:
            start = directory[entry + gone, 0]
            first = directory[entry + gone, 1]
            is_newest = gone == blocks - 1
            end = table[node, _COUNT] if is_newest else directory[entry + gone + 1, 1]
            for slot in range(start, start + min(end - first, left)):
                loops += neighbors[slot] == node
            if end - first > left:
                directory[entry + gone, 0] = start + left
                numbers[node, _SKIPPED] += left
                break
            skipped = np.int64(numbers[node, _SKIPPED])
            room = np.int64(numbers[node, _ROOM]) if is_newest else np.int64(0)
            _give_slots(start - skipped, skipped + end - first + room, times_bits, chains, totals)
            totals[_NUM_BLOCKS] -= 1
            numbers[node, _SKIPPED] = 0
            left -= end - first
            gone += 1
        if gone == blocks:
            kind = numbers[node, _REGION]
            directory[entry, 0] = region_chains[kind]
            region_chains[kind] = entry
            num_blocks[node] = 0
            numbers[node, _ROOM] = 0
            table[node, :] = 0
            continue
        for at in range(blocks - gone):
            directory[entry + at, 0] = directory[entry + gone + at, 0]
            directory[entry + at, 1] = max(np.int64(0), directory[entry + gone + at, 1] - num_old)
            since[entry + at] = since[entry + gone + at]
        since[entry] = times[directory[entry, 0]]
        num_blocks[node] = blocks - gone
        table[node, _COUNT] -= num_old
        table[node, _BEFORE] = directory[entry + blocks - gone - 1, 1]
        table[node, _SLOT] = directory[entry + blocks - gone - 1, 0]
    return dropped, loops


@compiled
def pack(table, num_blocks, numbers, directory, since, neighbors, times, eids, new_directory,
         new_since, new_neighbors, new_times, new_eids, totals):  # fmt: skip
    """Copies all blocks to fresh memory without the gaps between and before them."""
    slots = np.int64(0)
    entries = np.int64(0)
    for node in range(len(table)):
        blocks = num_blocks[node]
        if blocks == 0:
            continue
        kind = np.int32(1)
        while region_size(kind) < blocks:
            kind += 1
        entry = table[node, _ENTRY]
        for at in range(blocks):
            start = directory[entry + at, 0]
            first = directory[entry + at, 1]
            end = table[node, _COUNT] if at == blocks - 1 else directory[entry + at + 1, 1]
            new_directory[entries + at, 0] = slots
            new_directory[entries + at, 1] = first
            new_since[entries + at] = since[entry + at]
            for edge in range(end - first):
                new_neighbors[slots + edge] = neighbors[start + edge]
                new_times[slots + edge] = times[start + edge]
                new_eids[slots + edge] = eids[start + edge]
            if at == blocks - 1:
                table[node, _SLOT] = slots
                slots += numbers[node, _ROOM]
            slots += end - first
        numbers[node, _SKIPPED] = 0
        numbers[node, _REGION] = kind
        table[node, _ENTRY] = entries
        entries += region_size(kind)
    totals[_SLOTS_END] = slots
    totals[_ENTRIES_END] = entries
    totals[_FREE_SLOTS] = 0
