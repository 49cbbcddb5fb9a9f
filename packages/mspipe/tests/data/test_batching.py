"""Any cut has all events once and in order; the adaptive one is as long as its rule allows."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.data.batching import batches, bounds
from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.data.streams import zipf
from shared.errors import ConfigError

pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40)


def stream(pairs):
    src, dst = zip(*pairs, strict=True) if pairs else ((), ())
    return Events(src, dst, range(len(pairs)))


def loss(pairs):
    """Entries that find their node's memory out of date."""
    return 2 * len(pairs) - len({node for pair in pairs for node in pair})


@pytest.mark.parametrize("cut", ["uniform", "random-start", "adaptive"])
@given(pairs=pairs, size=st.integers(1, 12), seed=st.integers(-2, 5))
def test_all_events_are_there_once_in_order(cut, pairs, size, seed):
    events = stream(pairs)
    found = list(batches(events, size, num_negatives=0, cut=cut, seed=seed))
    assert [batch.index for batch in found] == list(range(len(found)))
    assert all(len(batch.events) for batch in found)
    eids = [eid for batch in found for eid in batch.events.eid.tolist()]
    assert eids == list(range(len(pairs)))
    lengths = [len(batch.events) for batch in found]
    if cut == "uniform":
        assert all(length == size for length in lengths[:-1])
    if cut == "random-start":
        assert all(length == size for length in lengths[1:-1])
        assert max(lengths, default=0) <= size


@given(pairs=pairs, size=st.integers(1, 12))
def test_adaptive_batches_by_their_definition(pairs, size):
    most = max((loss(pairs[i : i + size]) for i in range(0, len(pairs), size)), default=0)
    ends = [0]
    while ends[-1] < len(pairs):
        end = ends[-1] + 1
        while end < len(pairs) and loss(pairs[ends[-1] : end + 1]) <= most:
            end += 1
        ends.append(end)
    found = bounds(stream(pairs), size, "adaptive")
    assert found == ends
    losses = [loss(pairs[a:b]) for a, b in pairwise(found)]
    assert max(losses, default=0) <= most
    assert len(found) <= len(bounds(stream(pairs), size))


def test_random_starts_differ_by_seed_alone():
    events = zipf(20, 1000)
    firsts = [bounds(events, 50, "random-start", seed)[1] for seed in range(200)]
    assert firsts == [bounds(events, 50, "random-start", seed)[1] for seed in range(200)]
    assert min(firsts) == 1
    assert max(firsts) == 50
    # What fits in one batch stays whole.
    assert bounds(events[:50], 50, "random-start", 3) == [0, 50]


def test_negatives_do_not_depend_on_the_cut():
    events = zipf(20, 300)
    negatives = Negatives(events)
    expected = negatives.draw(events, 3, seed=5)
    for size, cut in ((7, "uniform"), (300, "uniform"), (20, "adaptive"), (20, "random-start")):
        found = list(batches(events, size, negatives, num_negatives=3, cut=cut, seed=5))
        assert torch.equal(torch.cat([batch.negatives for batch in found]), expected)
    # Random destinations of the events by default.
    assert torch.equal(
        next(iter(batches(events, 300, num_negatives=3, seed=5))).negatives, expected
    )


def test_roots_are_sources_destinations_and_negatives():
    events = Events([0, 1], [2, 3], [5, 6])
    batch = next(batches(events, num_negatives=2))
    nodes, times = batch.roots
    assert nodes.tolist() == [0, 1, 2, 3, 3, 3, 2, 2]
    assert times.tolist() == [5, 6, 5, 6, 5, 5, 6, 6]
    batch = next(batches(events, num_negatives=0))
    assert [part.tolist() for part in batch.roots] == [[0, 1, 2, 3], [5, 6, 5, 6]]


def test_refuses_at_once(unchecked):
    events = zipf(5, 10)
    with pytest.raises(ConfigError, match="batches of at least one event, got 0"):
        batches(events, 0)
    with pytest.raises(ConfigError, match="num_negatives of 0 or more, got -1"):
        batches(events, num_negatives=-1)
    with pytest.raises(ConfigError, match="one of uniform, random-start, adaptive, got 'even'"):
        batches(events, cut="even")
