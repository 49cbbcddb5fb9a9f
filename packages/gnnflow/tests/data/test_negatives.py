"""Negatives are drawn evenly from exactly the destinations their kind names, and repeatably."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.data.negatives import Negatives
from shared.data.events import Events
from shared.errors import ConfigError, DataError

pairs = st.lists(
    st.tuples(st.integers(0, 4), st.integers(5, 9), st.integers(0, 3)), min_size=2, max_size=25
)


def stream(rows):
    """Events (source, destination, gap since the one before)."""
    src, dst, gaps = zip(*rows, strict=True)
    return Events(src, dst, torch.tensor(gaps).cumsum(0))


def candidates(events, at, kind, since=None):
    """What an event's negatives may be, by their definition."""
    src, dst, t = events.src.tolist(), events.dst.tolist(), events.t.tolist()
    now = {d for s, d, when in zip(src, dst, t, strict=True) if s == src[at] and when == t[at]}
    earlier = [i for i in range(len(events)) if t[i] < t[at]]
    anywhere = {dst[i] for i in earlier} - now
    if kind == "random":
        return anywhere
    met = [i for i in earlier if src[i] == src[at]]
    if kind == "inductive":
        met = [
            i
            for i in met
            if not any(src[j] == src[i] and dst[j] == dst[i] and t[j] < since for j in met)
        ]
    return ({dst[i] for i in met} - now) or anywhere


@pytest.mark.parametrize("kind", ["random", "historical", "inductive"])
@given(rows=pairs, cut=st.integers(0, 25))
def test_draws_reach_exactly_the_candidates(kind, rows, cut):
    events = stream(rows)
    since = events.t[min(cut, len(events) - 1)].item()
    negatives = Negatives(kind, since=since, seed=3)
    negatives.observe(events[:cut])
    negatives.observe(events[cut:])
    if len(set(events.dst.tolist())) < 2:
        return
    expected = [candidates(events, at, kind, since) for at in range(len(events))]
    for at, wanted in enumerate(expected):
        if wanted:
            # 5 candidates at most: all are met in 120 draws but for a chance of 1e-11.
            assert set(negatives.draw(events[at : at + 1], 120)[0].tolist()) == wanted


def test_draws_are_even():
    rows = [(0, dst, 1) for dst in range(5, 9)] + [(1, 9, 1), (0, 6, 1)]
    events = stream(rows)
    for kind, wanted in (("random", [5, 7, 8, 9]), ("historical", [5, 7, 8])):
        negatives = Negatives(kind)
        negatives.observe(events)
        drawn = negatives.draw(events[-1:], 30_000)[0]
        counts = torch.bincount(drawn, minlength=10)
        expected = 30_000 / len(wanted)
        # Four standard deviations of a binomial count, at most.
        assert (counts[wanted] - expected).abs().max() < 4 * expected**0.5
        assert counts.sum() == counts[wanted].sum()


def test_draws_depend_on_seed_stream_and_event_alone():
    draw = torch.Generator().manual_seed(1)
    count = 300
    events = Events(
        torch.randint(0, 20, (count,), generator=draw),
        torch.randint(20, 60, (count,), generator=draw),
        torch.randint(0, 100, (count,), generator=draw).sort().values,
    )
    for kind in ("random", "historical", "inductive"):
        negatives = Negatives(kind, since=30, seed=7)
        negatives.observe(events[:200])
        late = events[100:200]
        whole = negatives.draw(late, 4)
        assert torch.equal(
            whole, torch.cat([negatives.draw(late[i : i + 7], 4) for i in range(0, 100, 7)])
        )
        shuffled = torch.randperm(100, generator=draw)
        assert torch.equal(whole[shuffled], negatives.draw(late[shuffled], 4))
        assert torch.equal(whole[:, :2], negatives.draw(late, 2))
        negatives.observe(events[200:])
        # Events of the cut's own time may have come since.
        earlier = late.t < events.t[200]
        assert torch.equal(whole[earlier], negatives.draw(late, 4)[earlier])
        again = Negatives(kind, since=30, seed=7)
        again.observe(events)
        assert torch.equal(again.draw(late, 4), negatives.draw(late, 4))
        assert not torch.equal(whole, negatives.draw(late, 4, stream=1))
        other = Negatives(kind, since=30, seed=8)
        other.observe(events)
        assert not torch.equal(other.draw(late, 4), negatives.draw(late, 4))


def test_float_times_and_huge_ids_of_events_work():
    events = Events([0, 0, 0], [1, 2, 1], [0.25, 0.5, 0.75], eid=[2**62, 2**62 + 1, 5])
    negatives = Negatives("historical")
    negatives.observe(events)
    assert negatives.draw(events[2:], 3).tolist() == [[2, 2, 2]]
    # The first event has no past, so that any destination but its own will do.
    assert negatives.draw(events[:1], 2).tolist() == [[2, 2]]
    assert negatives.draw(events, 0).shape == (3, 0)
    assert negatives.draw(events[:0], 2).shape == (0, 2)


def test_times_are_told_apart_to_the_second():
    # As float32 these three are one time, and the second's past would be empty.
    t = 1_360_000_000
    events = Events([0, 0, 0], [1, 2, 3], [t, t + 1, t + 2])
    negatives = Negatives("historical")
    negatives.observe(events)
    assert set(negatives.draw(events[2:], 40)[0].tolist()) == {1, 2}
    assert set(negatives.draw(events[1:2], 40)[0].tolist()) == {1}


def test_refuses():
    with pytest.raises(
        ConfigError, match="expected one of random, historical, inductive, got 'hard'"
    ):
        Negatives("hard")
    negatives = Negatives("inductive")
    events = Events([0, 0], [1, 2], [5, 5])
    with pytest.raises(ConfigError, match="expected since="):
        negatives.draw(events, 1)
    negatives.observe(events)
    with pytest.raises(DataError, match="in order of time, none before 5"):
        negatives.observe(Events([0], [1], [4]))
    with pytest.raises(DataError, match="in order of time"):
        negatives.observe(Events([0, 0], [1, 1], [7, 6]))
    with pytest.raises(DataError, match=r"ids below 2\^31, got 2147483648"):
        negatives.observe(Events([0], [2**31], [9]))
    with pytest.raises(ConfigError, match="0 or more negatives an event, got -1"):
        negatives.draw(events, -1)
    lonely = Negatives()
    lonely.observe(Events([0, 1], [3, 3], [1, 2]))
    with pytest.raises(DataError, match=r"event 0 \(1 -> 3\): expected another destination"):
        lonely.draw(Events([1], [3], [2]))
