"""Temporal sampling in Triton: a tile of roots a program, each lane searching for its own root.

Kernels write [num_roots, fanout] with the count of each root; the gaps are closed afterwards. Slots
and the rest of the adjacency may lie in pinned host memory, which the device reads over the bus.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.philox import key_words
from shared.kernels.philox.gpu import philox_words
from shared.kernels.temporal.adjacency import Adjacency

__all__ = ["count_before", "recent", "uniform"]

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# Roots of one program, and neighbours; guesses, no device was at hand.
_ROOTS = 32
_EDGES = 256


@triton.jit
def _count_before(  # noqa: ANN202
    table,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    directory,  # noqa: ANN001
    opened,  # noqa: ANN001
    times,  # noqa: ANN001
    node,  # noqa: ANN001
    bound,  # noqa: ANN001
    live,  # noqa: ANN001
):
    """How many edges of each lane's node are earlier than the lane's bound."""
    count = tl.load(table + node * 4 + 2, mask=live, other=0)
    live = live & (count > 0)
    slot = tl.load(table + node * 4, mask=live, other=0)
    first = tl.load(table + node * 4 + 1, mask=live, other=0)
    entry = tl.load(table + node * 4 + 3, mask=live, other=0)
    in_newest = tl.load(times + slot, mask=live, other=0) < bound
    searched = live & (in_newest == 0)
    left = tl.zeros_like(count)
    right = tl.where(searched, tl.load(num_blocks + node, mask=live, other=1).to(tl.int64) - 1, 0)
    while tl.max(right - left, 0) > 0:
        open_ = left < right
        middle = (left + right) >> 1
        earlier = tl.load(opened + entry + middle, mask=open_, other=0) < bound
        left = tl.where(open_ & earlier, middle + 1, left)
        right = tl.where(open_ & (earlier == 0), middle, right)
    block = entry + left - 1
    inside = searched & (left > 0)
    slot = tl.where(inside, tl.load(directory + block * 2, mask=inside, other=0), slot)
    before = tl.load(directory + block * 2 + 1, mask=inside, other=0)
    until = tl.load(directory + block * 2 + 3, mask=inside, other=0)
    first = tl.where(searched, before, first)
    low = tl.zeros_like(count)
    high = tl.where(searched, until - before, count - first)
    high = tl.where(live, high, 0)
    while tl.max(high - low, 0) > 0:
        open_ = low < high
        middle = (low + high) >> 1
        earlier = tl.load(times + slot + middle, mask=open_, other=0) < bound
        low = tl.where(open_ & earlier, middle + 1, low)
        high = tl.where(open_ & (earlier == 0), middle, high)
    return tl.where(live, first + low, 0)


@triton.jit
def _place_of(table, num_blocks, directory, node, rank, live):  # noqa: ANN001, ANN202
    """The slot of each lane's node's edge of a rank, counted from its oldest."""
    slot = tl.load(table + node * 4, mask=live, other=0)
    first = tl.load(table + node * 4 + 1, mask=live, other=0)
    entry = tl.load(table + node * 4 + 3, mask=live, other=0)
    searched = live & (rank < first)
    blocks = tl.load(num_blocks + node, mask=searched, other=2).to(tl.int64)
    left = tl.zeros_like(rank)
    right = tl.where(searched, blocks - 2, 0)
    while tl.max(right - left, 0) > 0:
        open_ = left < right
        middle = (left + right + 1) >> 1
        not_after = tl.load(directory + (entry + middle) * 2 + 1, mask=open_, other=0) <= rank
        left = tl.where(open_ & not_after, middle, left)
        right = tl.where(open_ & (not_after == 0), middle - 1, right)
    block = (entry + left) * 2
    slot = tl.where(searched, tl.load(directory + block, mask=searched, other=0), slot)
    first = tl.where(searched, tl.load(directory + block + 1, mask=searched, other=0), first)
    return slot + rank - first


@triton.jit
def _draw(node, bits, number, limit, k0, k1):  # noqa: ANN001, ANN202
    """A number in [0, limit) a lane, of its root's own stream; limit < 2^31."""
    call = (number >> 1).to(tl.uint32)
    c0 = (node & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((node >> 32) & 0xFFFF).to(tl.uint32) | (call << 16)
    c2 = (bits & 0xFFFFFFFF).to(tl.uint32)
    c3 = ((bits >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, k0, k1)
    is_second = (number & 1) == 1
    low = tl.where(is_second, w2, w0).to(tl.uint64)
    high = tl.where(is_second, w3, w1).to(tl.uint64)
    size = limit.to(tl.uint64)
    return ((high * size + ((low * size) >> 32)) >> 32).to(tl.int64)


# A key is no shape: specialising on its value would compile anew for some of them.
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _sample(  # noqa: ANN202
    table,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    directory,  # noqa: ANN001
    opened,  # noqa: ANN001
    times,  # noqa: ANN001
    roots,  # noqa: ANN001
    bits,  # noqa: ANN001
    before,  # noqa: ANN001
    since,  # noqa: ANN001
    places,  # noqa: ANN001
    counts,  # noqa: ANN001
    num_roots,  # noqa: ANN001
    num_nodes,  # noqa: ANN001
    fanout,  # noqa: ANN001
    key_low,  # noqa: ANN001
    key_high,  # noqa: ANN001
    HAS_SINCE: tl.constexpr,
    UNIFORM: tl.constexpr,
    REPLACE: tl.constexpr,
    ROOTS: tl.constexpr,
    FANOUT: tl.constexpr,
):
    root = tl.program_id(0).to(tl.int64) * ROOTS + tl.arange(0, ROOTS)
    here = root < num_roots
    node = tl.load(roots + root, mask=here, other=-1)
    live = here & (node >= 0) & (node < num_nodes)
    bound = tl.load(before + root, mask=here, other=0)
    end = _count_before(table, num_blocks, directory, opened, times, node, bound, live)
    begin = tl.zeros_like(end)
    if HAS_SINCE:
        oldest = tl.load(since + root, mask=here, other=0)
        begin = _count_before(table, num_blocks, directory, opened, times, node, oldest, live)
    size = tl.maximum(end - begin, 0)
    count = tl.minimum(size, fanout)
    if REPLACE:
        count = tl.where(size > 0, fanout, 0)
    time_bits = tl.load(bits + root, mask=here, other=0)
    k0 = key_low.to(tl.uint32)
    k1 = key_high.to(tl.uint32)
    columns = tl.arange(0, FANOUT)
    picked = tl.full([ROOTS, FANOUT], -1, tl.int64)
    for number in range(fanout):
        wanted = live & (number < count)
        rank = size - 1 - number  # the newest first
        if UNIFORM:
            at = tl.zeros([ROOTS], tl.int64) + number
            if REPLACE:
                rank = _draw(node, time_bits, at, size, k0, k1)
            else:
                # Floyd's algorithm: the new last one in place of one that was drawn already.
                last = size - fanout + number
                drawn = _draw(node, time_bits, at, tl.maximum(last + 1, 1), k0, k1)
                known = tl.max((picked == drawn[:, None]).to(tl.int32), 1) > 0
                drawn = tl.where(known, last, drawn)
                picked = tl.where(columns[None, :] == number, drawn[:, None], picked)
                rank = tl.where(size <= fanout, rank, drawn)
        place = _place_of(table, num_blocks, directory, node, begin + rank, wanted)
        tl.store(places + root * fanout + number, place, mask=wanted)
    tl.store(counts + root, count, mask=here)


@triton.jit
def _count(  # noqa: ANN202
    table,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    directory,  # noqa: ANN001
    opened,  # noqa: ANN001
    times,  # noqa: ANN001
    bounds,  # noqa: ANN001
    counts,  # noqa: ANN001
    num_nodes,  # noqa: ANN001
    NODES: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    live = node < num_nodes
    bound = tl.load(bounds + node, mask=live, other=0)
    count = _count_before(table, num_blocks, directory, opened, times, node, bound, live)
    tl.store(counts + node, count, mask=live)


@triton.jit
def _collect(  # noqa: ANN202
    neighbors,  # noqa: ANN001
    times,  # noqa: ANN001
    eids,  # noqa: ANN001
    places,  # noqa: ANN001
    row,  # noqa: ANN001
    root_times,  # noqa: ANN001
    nodes_out,  # noqa: ANN001
    times_out,  # noqa: ANN001
    dt_out,  # noqa: ANN001
    eids_out,  # noqa: ANN001
    num_sampled,  # noqa: ANN001
    EDGES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    live = at < num_sampled
    place = tl.load(places + at, mask=live, other=0)
    root = tl.load(row + at, mask=live, other=0)
    time = tl.load(times + place, mask=live, other=0)
    root_time = tl.load(root_times + root, mask=live, other=0)
    tl.store(nodes_out + at, tl.load(neighbors + place, mask=live, other=0).to(tl.int64), mask=live)
    tl.store(times_out + at, time, mask=live)
    tl.store(dt_out + at, root_time - time, mask=live)
    tl.store(eids_out + at, tl.load(eids + place, mask=live, other=0).to(tl.int64), mask=live)


def count_before(adjacency: Adjacency, bounds: Tensor) -> Tensor:
    """How many edges of each node are earlier than the node's bound, int64 [num_nodes]."""
    counts = torch.zeros(adjacency.num_nodes, dtype=torch.int64, device=bounds.device)
    if adjacency.num_nodes and len(adjacency.times):
        _count[(triton.cdiv(adjacency.num_nodes, _ROOTS),)](
            adjacency.table,
            adjacency.num_blocks,
            adjacency.directory,
            adjacency.since,
            adjacency.times,
            bounds,
            counts,
            adjacency.num_nodes,
            NODES=_ROOTS,
        )
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
    return _run(adjacency, roots, root_times, before, since, fanout, None, 0)


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
    return _run(adjacency, roots, root_times, before, since, fanout, replace, key)


def _run(
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
    replace: bool | None,
    key: int,
) -> Found:
    num_roots, device = len(roots), roots.device
    places = torch.empty(num_roots, fanout, dtype=torch.int64, device=device)
    counts = torch.zeros(num_roots, dtype=torch.int64, device=device)
    # Signed, so that a key word has the same type whatever its value; the kernel reads the bits.
    key_low, key_high = (word - (1 << 32) if word >> 31 else word for word in key_words(key))
    if num_roots and fanout and adjacency.num_nodes and len(adjacency.times):
        _sample[(triton.cdiv(num_roots, _ROOTS),)](
            adjacency.table,
            adjacency.num_blocks,
            adjacency.directory,
            adjacency.since,
            adjacency.times,
            roots,
            root_times.view(torch.int64),
            before,
            before if since is None else since,
            places,
            counts,
            num_roots,
            adjacency.num_nodes,
            fanout,
            key_low,
            key_high,
            HAS_SINCE=since is not None,
            UNIFORM=replace is not None,
            REPLACE=bool(replace),
            ROOTS=_ROOTS,
            FANOUT=triton.next_power_of_2(fanout) if replace is False else 1,
        )
    places = places[torch.arange(fanout, device=device) < counts[:, None]]
    row = torch.repeat_interleave(torch.arange(num_roots, device=device), counts)
    nodes, eids = torch.empty(2, len(row), dtype=torch.int64, device=device)
    times, dt = torch.empty(2, len(row), dtype=root_times.dtype, device=device)
    if len(row):
        _collect[(triton.cdiv(len(row), _EDGES),)](
            adjacency.neighbors,
            adjacency.times,
            adjacency.eids,
            places,
            row,
            root_times,
            nodes,
            times,
            dt,
            eids,
            len(row),
            EDGES=_EDGES,
        )
    return nodes, times, dt, eids, row
