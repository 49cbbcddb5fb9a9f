"""Negatives are drawn evenly from exactly the destinations their kind names, and repeatably."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.data.streams import zipf
from shared.errors import ConfigError, DataError

KINDS = ["random", "historical", "inductive"]
rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(3, 8), st.integers(0, 2)), min_size=2, max_size=25
)


def stream(rows):
    """Events (source, destination, time since the one before)."""
    src, dst, gaps = zip(*rows, strict=True)
    return Events(src, dst, torch.tensor(gaps).cumsum(0))


def candidates(events, at, kind, since):
    """What an event's negatives may be, by their definition."""
    rows = list(zip(*(part.tolist() for part in (events.src, events.dst, events.t)), strict=True))
    src, own, now = rows[at]
    anywhere = {dst for _, dst, _ in rows} - {own}
    first_met = {}
    for one, dst, t in rows:
        if one == src:
            first_met.setdefault(dst, t)
    met = {dst for dst, t in first_met.items() if t < now} - {own}
    if kind == "inductive":
        met = {dst for dst in met if first_met[dst] >= since}
    return met if met and kind != "random" else anywhere


@pytest.mark.parametrize("kind", KINDS)
@given(rows=rows, cut=st.integers(0, 24))
def test_draws_reach_exactly_the_candidates(kind, rows, cut):
    events = stream(rows)
    if len(events.dst.unique()) < 2:
        return
    since = events.t[min(cut, len(events) - 1)].item()
    # 5 candidates at most: all are met in 150 draws but for a chance of 1e-14.
    drawn = Negatives(events, kind, since).draw(events, 150, seed=3)
    for at, found in enumerate(drawn.tolist()):
        assert set(found) == candidates(events, at, kind, since)


def test_draws_are_even():
    events = stream([(0, dst, 1) for dst in range(5, 9)] + [(1, 9, 1), (0, 6, 1)])
    for kind, since, wanted in (
        ("random", None, [5, 7, 8, 9]),
        ("historical", None, [5, 7, 8]),
        ("inductive", 3, [7, 8]),
    ):
        drawn = Negatives(events, kind, since).draw(events[-1:], 30_000)[0]
        counts = torch.bincount(drawn, minlength=10)
        expected = 30_000 / len(wanted)
        # Four standard deviations of a binomial count, at most.
        assert (counts[wanted] - expected).abs().max() < 4 * expected**0.5
        assert counts.sum() == counts[wanted].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_on_seed_and_event_alone(kind):
    events = zipf(40, 300, 1)
    negatives = Negatives(events, kind, since=100)
    whole = negatives.draw(events, 4, seed=7)
    assert not bool((whole == events.dst[:, None]).any())
    parts = [negatives.draw(events[i : i + 7], 4, seed=7) for i in range(0, 300, 7)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[:, :2], negatives.draw(events, 2, seed=7))
    assert torch.equal(whole, Negatives(events, kind, since=100).draw(events, 4, seed=7))
    assert not torch.equal(whole, negatives.draw(events, 4, seed=8))
    # The draws of one event are independent.
    assert len(torch.unique(whole, dim=1)[0]) == 4


def test_no_draws():
    negatives = Negatives(stream([(0, 1, 1), (0, 2, 1)]))
    part = stream([(0, 1, 1)])
    assert negatives.draw(part, 0).shape == (1, 0)
    assert negatives.draw(part[:0], 3).shape == (0, 3)


def test_events_that_the_stream_does_not_have():
    stream_of = stream([(0, 1, 1), (0, 2, 1), (1, 3, 1)])
    late = Events([0, 1], [9, 9], [50, 50])
    assert set(Negatives(stream_of).draw(late, 60)[0].tolist()) == {1, 2, 3}
    drawn = Negatives(stream_of, "historical").draw(late, 60)
    assert [set(row) for row in drawn.tolist()] == [{1, 2}, {3}]


def test_times_are_told_apart_to_the_second():
    # As float32 these three are one time, and the second's past would be empty.
    t = 1_360_000_000
    events = Events([0, 0, 0], [1, 2, 3], [t, t + 1, t + 2])
    negatives = Negatives(events, "historical")
    assert set(negatives.draw(events[2:], 40)[0].tolist()) == {1, 2}
    assert set(negatives.draw(events[1:2], 40)[0].tolist()) == {1}


def test_refuses(unchecked):
    events = stream([(0, 1, 1), (0, 2, 1)])
    with pytest.raises(ConfigError, match="one of random, historical, inductive, got 'hard'"):
        Negatives(events, "hard")
    with pytest.raises(ConfigError, match="inductive ones need since="):
        Negatives(events, "inductive")
    with pytest.raises(ConfigError, match="num_negatives of 0 or more, got -1"):
        Negatives(events).draw(events, -1)
    with pytest.raises(DataError, match="nodes below 3, as the stream has them"):
        Negatives(events).draw(Events([3], [1], [1]))
    with pytest.raises(DataError, match="at least two different destinations"):
        Negatives(events[:1]).draw(events[:1])
    with pytest.raises(DataError, match="nodes below 0"):
        Negatives(events[:0]).draw(events)
