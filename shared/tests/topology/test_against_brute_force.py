"""The closed forms of `cost` against the algorithms, played step by step on integer contents."""

from functools import partial

import pytest

from shared.errors import TopologyError
from shared.topology import Link, cost

LINK = Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
NUM_BYTES = 720_720  # divides by every number of ranks below


def ring(ranks: int, held: list[set], pieces: int, done) -> float:
    """Each rank passes a new piece to the next one, step by step, until `done`."""
    seconds = 0.0
    sending = list(range(ranks))
    while not done(held):
        arriving = [(rank, sending[rank - 1]) for rank in range(ranks)]
        for rank, piece in arriving:
            held[rank].add(piece)
        sending = [piece for _, piece in arriving]
        seconds += LINK.time_s(NUM_BYTES / pieces)
    return seconds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13])
def test_ring_gathers(ranks):
    def full(held):
        return all(len(pieces) == ranks for pieces in held)

    seconds = ring(ranks, [{rank} for rank in range(ranks)], 1, full)
    assert cost.all_gather_s(LINK, NUM_BYTES, ranks) == pytest.approx(seconds)
    # A reduce-scatter is the same ring run backwards on pieces of 1/n.
    seconds = ring(ranks, [{rank} for rank in range(ranks)], ranks, full)
    assert cost.reduce_scatter_s(LINK, NUM_BYTES, ranks) == pytest.approx(seconds)
    assert cost.ring_all_reduce_s(LINK, NUM_BYTES, ranks) == pytest.approx(2 * seconds)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13, 10_000])
def test_tree_doubles_those_who_have_it(ranks):
    having, seconds = 1, 0.0
    while having < ranks:
        having, seconds = min(2 * having, ranks), seconds + LINK.time_s(NUM_BYTES)
    assert cost.tree_broadcast_s(LINK, NUM_BYTES, ranks) == pytest.approx(seconds)


def test_rounds_are_as_slow_as_their_slowest_message():
    slow = Link(alpha_s=0.5, beta_s_per_byte=0.0)
    rounds = [[(LINK, 1000), (slow, 1)], [(LINK, 1000), (slow, 0)], [], [(LINK, 0)]]
    assert cost.all_to_all_s(rounds) == pytest.approx(0.5 + LINK.time_s(1000))


def test_empty_message_is_not_sent():
    assert cost.point_to_point_s(LINK, 0) == 0.0
    assert cost.point_to_point_s(LINK, 10) == LINK.time_s(10)


@pytest.mark.parametrize(
    "collective",
    [cost.all_gather_s, cost.reduce_scatter_s, cost.ring_all_reduce_s, cost.tree_broadcast_s],
)
@pytest.mark.parametrize(("num_bytes", "ranks"), [(1, 0), (-1, 2)])
def test_no_rank_or_negative_bytes(collective, num_bytes, ranks):
    with pytest.raises(TopologyError, match="at least one rank and no negative bytes"):
        partial(collective, LINK)(num_bytes, ranks)
