"""Routes of values, and tables of their bytes, against a plain enumeration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.planner.costs import ChainCosts
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import find_feeds, find_routes, list_messages


def test_skips_go_directly_to_their_reader(make_profile):
    chain = make_profile(6, skips=True).chains[0]
    routes = find_routes(chain.reads, chain.writes, [(0, 2), (2, 4), (4, 6)], [(0,), (1,), (2,)])
    assert {route[:2]: set(route.keys) for route in routes} == {
        (0, 1): {"h1", "emb"},
        (0, 2): {"s0", "s1", "emb"},
        (1, 2): {"h3"},
    }


def test_folded_skips_stay_on_their_device(make_profile):
    chain = make_profile(6, skips=True).chains[0]
    spans = [(0, 2), (2, 4), (4, 6)]
    routes = find_routes(chain.reads, chain.writes, spans, [(0,), (1,), (0,)])
    # "emb" is written on the outer device and read on the inner one; nothing else but hidden states.
    assert {route[:2]: set(route.keys) for route in routes} == {
        (0, 1): {"h1", "emb"},
        (1, 2): {"h3"},
    }


def test_a_value_travels_once_to_each_device():
    # Layers 1 and 3 read "a" on the same device: one route, to the first reader.
    reads = [("x",), ("a",), ("b",), ("a", "c")]
    writes = [("a",), ("b",), ("c",), ("output",)]
    spans = [(0, 1), (1, 2), (2, 3), (3, 4)]
    routes = find_routes(reads, writes, spans, [(0,), (1,), (2,), (1,)])
    assert routes == ((0, 1, ("a",)), (1, 2, ("b",)), (2, 3, ("c",)))


def test_feeds_are_those_of_inputs_and_of_the_target():
    reads, writes = [("x",), ("a", "text"), ("b",)], [("a",), ("b",), ("output",)]
    feeds = {"x": ("z",), "text": ("h",), "target": ("z", "teacher")}
    spans = [(0, 1), (1, 2), (2, 3)]
    assert find_feeds(reads, writes, spans, feeds) == (("z",), ("h",), ("teacher", "z"))


@given(st.integers(2, 9), st.booleans(), st.data())
def test_traffic_table_counts_each_value_once(make_profile, layers, skips, data):
    profile = make_profile(layers, skips=skips)
    chain = profile.chains[0]
    first = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(first + 1, layers))
    received = sent = 0
    for writer, keys in enumerate(chain.writes):
        for key in keys:
            readers = [i for i, own in enumerate(chain.reads) if key in own]
            inside = first <= writer < stop
            if not inside and writer < first and any(first <= i < stop for i in readers):
                received += chain.value_bytes[key]
            if inside and any(i >= stop for i in readers):
                sent += chain.value_bytes[key]
    # With gradients of all values, both directions carry what comes in and what goes out.
    assert ChainCosts(profile, 0).traffic_table[first, stop] == received + sent


def test_values_without_gradient_travel_one_way(make_profile):
    profile = make_profile(4, hidden_bytes=100)
    object.__setattr__(profile.chains[0], "differentiable", ())
    table = ChainCosts(profile, 0).traffic_table
    assert table[0, 2] == 100 + 10
    assert table[2, 4] == 100 + 10
    assert np.all(np.tril(table) == 0)
    assert ChainCosts(make_profile(4, hidden_bytes=100), 0).traffic_table[1, 2] == pytest.approx(
        100 + 10 + 100
    )


def test_messages_carry_the_rows_that_two_ranks_share(make_profile):
    # Two copies; in each one rank holds the first layer and two the second.
    chain = make_profile(2).chains[0]
    plan = Plan(
        placement="chain", num_stages=2, num_micro_batches=2, num_groups=2, batch_size=16,
        spans=((0, 1), (1, 2)), devices=((0, 2), (1, 3, 4, 5)), order=((Action("step"),),) * 6,
    )  # fmt: skip
    rows = {}
    for message in list_messages(plan, [chain], {}, plan.order):
        assert message.sent_by.micro_batch == message.used_by.micro_batch
        place = message.sent_by.kind, message.sent_by.micro_batch
        rows[(*place, message.sender, message.receiver)] = message.ranges
        for action, rank in (
            (message.sent_by, message.sender), (message.used_by, message.receiver)
        ):  # fmt: skip
            own = plan.samples(action.stage, action.micro_batch, rank)
            assert all(own.start <= first < stop <= own.stop for first, stop in message.ranges)
    assert rows["forward", 0, 0, 1] == ((0, 2),)
    assert rows["forward", 1, 0, 3] == ((6, 8),)
    assert rows["backward", 1, 4, 2] == ((12, 14),)
    assert rows["forward", 1, 2, 5] == ((14, 16),)
    # Two directions, two micro-batches, four pairs.
    assert len(rows) == 2 * 2 * 4
