from dataclasses import replace as changed
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels import temporal
from shared.kernels.philox import stream_key
from shared.kernels.temporal import Adjacency, count_before, reference, sample

COLUMNS = ("table", "num_blocks", "directory", "since", "neighbors", "times", "eids")
INT, FLOAT = torch.int64, torch.float64


def edges(num_nodes=12, num_edges=300, seed=0, dtype=INT, span=60):
    g = torch.Generator().manual_seed(seed)
    # Squared: skewed degrees, and nodes without any edge; few times, so that many are equal.
    src = (torch.rand(num_edges, generator=g) ** 2 * num_nodes).long()
    dst = torch.randint(0, num_nodes, (num_edges,), generator=g)
    return src, dst, torch.randint(0, span, (num_edges,), generator=g).to(dtype)


def in_blocks(adjacency: Adjacency, seed=0) -> Adjacency:
    """The same edges in blocks of random sizes that lie apart, in another order, with gaps."""
    noise = np.random.default_rng(seed)
    table, num_blocks, directory, since = [], [], [], []
    pieces = []
    for slot, _, count, _ in adjacency.table.tolist():
        cuts = sorted({0, *noise.integers(0, count + 1, noise.integers(0, 5)).tolist()} - {count})
        entry = len(directory)
        for first, end in pairwise([*cuts, count]):
            directory.append([len(pieces), first])
            since.append(adjacency.times[slot + first].item())
            pieces.append((slot + first, slot + end))
        table.append([len(pieces) - 1 if cuts else 0, cuts[-1] if cuts else 0, count, entry])
        num_blocks.append(len(cuts))
    order = noise.permutation(len(pieces))
    starts, slots = {}, []
    for piece in order.tolist():
        slots += [0] * int(noise.integers(0, 3))
        starts[piece] = len(slots)
        slots += range(*pieces[piece])
    for row, blocks in zip(table, num_blocks, strict=True):
        row[0] = starts[row[0]] if blocks else 0
    for entry in directory:
        entry[0] = starts[entry[0]]
    index = torch.tensor(slots, dtype=INT)
    return Adjacency(
        table=torch.tensor(table, dtype=INT).view(-1, 4),
        num_blocks=torch.tensor(num_blocks, dtype=torch.int32),
        directory=torch.tensor(directory, dtype=INT).view(-1, 2),
        since=torch.tensor(since, dtype=adjacency.times.dtype),
        neighbors=adjacency.neighbors[index].int(),
        times=adjacency.times[index],
        eids=adjacency.eids[index].int() if seed % 2 else adjacency.eids[index],
    )


def brute(events, root, before, since=None):
    """A root's edges, newest first, from the list of events."""
    src, dst, times = events
    found = [
        (time, at, dst[at].item())
        for at, time in enumerate(times.tolist())
        if src[at] == root and time < before and (since is None or time >= since)
    ]
    return sorted(found, reverse=True)


def queries(num_nodes, count=80, seed=1, dtype=INT, span=60):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, num_nodes, (count,), generator=g),
        torch.randint(-2, span + 3, (count,), generator=g).to(dtype),
    )


def run(form, adjacency, roots, times, fanout, *, before=None, since=None, replace=None, key=0):
    device = form.device
    moved = changed(adjacency, **{name: getattr(adjacency, name).to(device) for name in COLUMNS})
    arguments = [moved, roots.to(device), times.to(device), (times if before is None else before)]
    arguments[3] = arguments[3].to(device)
    arguments.append(None if since is None else since.to(device))
    if replace is None:
        found = form.of("temporal").recent(*arguments, fanout)
    else:
        found = form.of("temporal").uniform(*arguments, fanout, replace, key)
    return [tensor.cpu() for tensor in found]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fanout", "is_blocked", "dtype"),
    [(0, True, INT), (3, False, INT), (3, True, FLOAT), (50, True, INT), (50, False, FLOAT)],
)
def test_recent_is_the_sorted_list(form, fanout, is_blocked, dtype):
    events = edges(dtype=dtype)
    adjacency = Adjacency.from_edges(*events, num_nodes=12)
    roots, times = queries(12, 40, dtype=dtype)
    expected = [
        (neighbor, time, times[at].item() - time, eid, at)
        for at, root in enumerate(roots.tolist())
        for time, eid, neighbor in brute(events, root, times[at].item())[:fanout]
    ]
    found = run(form, in_blocks(adjacency) if is_blocked else adjacency, roots, times, fanout)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


@pytest.mark.parametrize("replace", [None, True, False])
@settings(max_examples=25)
@given(
    num_edges=st.integers(0, 120),
    fanout=st.integers(0, 9),
    window=st.none() | st.integers(0, 40),
    seed=st.integers(0, 1000),
    is_float=st.booleans(),
)
def test_cpu_form_is_the_reference(replace, num_edges, fanout, window, seed, is_float):
    check_form(None, replace, num_edges, fanout, window, seed, is_float)


@pytest.mark.parametrize("replace", [None, True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_form_is_the_reference(form, replace, seed):
    check_form(form, replace, 40 * seed, 1 + 2 * seed, [None, 0, 5, 30][seed], seed, seed % 2)


def check_form(form, replace, num_edges, fanout, window, seed, is_float):
    dtype = FLOAT if is_float else INT
    blocked = in_blocks(Adjacency.from_edges(*edges(8, num_edges, seed, dtype), num_nodes=8), seed)
    roots, times = queries(11, 40, seed, dtype)  # some nodes lie beyond the table
    roots[::7] -= 5  # and some are no nodes
    since = None if window is None else times - window
    key = stream_key(seed, 3)
    if replace is None:
        expected = reference.recent(blocked, roots, times, times, since, fanout)
    else:
        expected = reference.uniform(blocked, roots, times, times, since, fanout, replace, key)
    if form is None:
        options = {"policy": "recent" if replace is None else "uniform", "key": key}
        block = sample(blocked, roots, times, fanout, since=since, replace=bool(replace), **options)
        found = (block.nodes, block.times, block.dt, block.eids, block.row)
    else:
        found = run(form, blocked, roots, times, fanout, since=since, replace=replace, key=key)
    assert_equal(found, expected)
    in_range = sum(
        len(brute(edges(8, num_edges, seed, dtype), r, t, None if window is None else t - window))
        > 0
        for r, t in zip(roots.tolist(), times.tolist(), strict=True)
    )
    assert found[4].unique().numel() == (in_range if fanout else 0)


def test_draws_with_replacement_are_even():
    num_edges, draws = 10, 40_000
    adjacency = Adjacency.from_edges(
        torch.zeros(num_edges, dtype=INT), torch.arange(num_edges), torch.arange(num_edges)
    )
    roots = torch.zeros(draws // 4, dtype=INT)
    block = sample(adjacency, roots, 10 + torch.arange(len(roots)), 4, policy="uniform", key=7)
    counts = torch.bincount(block.nodes, minlength=num_edges).double()
    expected = draws / num_edges
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 27.9  # one in a thousand for nine degrees of freedom


def test_draws_without_replacement_are_even_and_different():
    num_edges = 7
    adjacency = Adjacency.from_edges(
        torch.zeros(num_edges, dtype=INT), torch.arange(num_edges), torch.arange(num_edges)
    )
    roots = torch.zeros(20_000, dtype=INT)
    block = sample(
        adjacency, roots, 10 + torch.arange(len(roots)), 3, policy="uniform", replace=False, key=7
    )
    of_root = block.nodes.view(-1, 3).sort(1).values
    assert (of_root.diff(dim=1) > 0).all()
    # All 35 triples are equally likely.
    codes = (of_root * torch.tensor([49, 7, 1])).sum(1).unique(return_counts=True)[1].double()
    assert len(codes) == 35
    chi_squared = ((codes - len(roots) / 35) ** 2 / (len(roots) / 35)).sum()
    assert chi_squared < 65.2  # one in a thousand for 34 degrees of freedom


@pytest.mark.parametrize("policy", ["recent", "uniform"])
def test_cuts_into_batches_and_threads_change_nothing(policy, two_threads):
    adjacency = Adjacency.from_edges(*edges(500, 40_000), num_nodes=500)
    roots, times = queries(500, 20_000)
    whole = sample(adjacency, roots, times, 10, policy=policy, key=5)
    torch.set_num_threads(1)
    parts = [
        sample(adjacency, roots[at : at + 777], times[at : at + 777], 10, policy=policy, key=5)
        for at in range(0, len(roots), 777)
    ]
    for name in ("nodes", "times", "dt", "eids"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(p, name) for p in parts]))
    rows = torch.cat([part.row + 777 * at for at, part in enumerate(parts)])
    assert torch.equal(whole.row, rows)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_counts_of_earlier_edges(form, is_blocked):
    events = edges()
    adjacency = Adjacency.from_edges(*events, num_nodes=12)
    adjacency = in_blocks(adjacency) if is_blocked else adjacency
    bounds = torch.arange(12) * 5
    expected = [len(brute(events, node, bound)) for node, bound in enumerate(bounds.tolist())]
    assert form.of("temporal").count_before(adjacency, bounds).tolist() == expected
    assert count_before(adjacency, bounds).tolist() == expected
    assert reference.count_before(adjacency, bounds).tolist() == expected


def test_streams_and_roots_draw_apart():
    adjacency = Adjacency.from_edges(
        torch.zeros(100, dtype=INT), torch.arange(100), torch.arange(100)
    )
    roots, times = torch.zeros(4, dtype=INT), torch.tensor([200, 200, 201, 202])
    first = sample(adjacency, roots, times, 20, policy="uniform", key=1).nodes.view(4, 20)
    other = sample(adjacency, roots, times, 20, policy="uniform", key=2).nodes.view(4, 20)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first, other)


@pytest.fixture
def unchecked():
    """What users run: no types are checked at calls, so that the errors are the kernel's own."""
    jaxtyping = pytest.importorskip("jaxtyping")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_bad_input_is_refused(unchecked):
    adjacency = Adjacency.from_edges(*edges(), num_nodes=12)
    roots, times = queries(12)
    with pytest.raises(ConfigError, match="policy"):
        sample(adjacency, roots, times, 3, policy="newest")
    with pytest.raises(ConfigError, match="fanout"):
        sample(adjacency, roots, times, -1)
    with pytest.raises(ConfigError, match="fanout"):
        sample(adjacency, roots, times, temporal.MAX_FANOUT + 1)
    with pytest.raises(DataError, match="root_times"):
        sample(adjacency, roots, times.double(), 3)
    with pytest.raises(DataError, match="since"):
        sample(adjacency, roots, times, 3, since=times[1:])
    with pytest.raises(DataError, match="int64 roots"):
        sample(adjacency, roots.int(), times, 3)
    with pytest.raises(DataError, match="each of 12 nodes"):
        count_before(adjacency, times)
    src, dst, when = edges()
    with pytest.raises(DataError, match="one length"):
        Adjacency.from_edges(src, dst[1:], when)
    with pytest.raises(DataError, match=r"in \[0, 3\)"):
        Adjacency.from_edges(src, dst, when, num_nodes=3)
    with pytest.raises(DataError, match="int64 or float64"):
        Adjacency.from_edges(src, dst, when.float())
