import pytest
from hypothesis import given
from hypothesis import strategies as st

import memo
from memo.planner.addresses import ALLOCATORS
from shared.errors import ConfigError

MIB = 1 << 20


def trace(*intervals):
    return memo.Trace(intervals=tuple(intervals), dropped={})


def reserved(allocator, *intervals):
    return memo.emulate(trace(*intervals), allocator=allocator).reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "caching", "expandable"),
    [
        ([1], 2, 2),
        ([MIB], 2, 2),
        ([MIB, MIB], 2, 2),
        ([MIB, MIB, 1], 4, 4),
        ([MIB + 1], 20, 20),
        ([5 * MIB] * 4, 20, 20),
        ([5 * MIB] * 5, 40, 40),
        ([10 * MIB - 512], 20, 20),
        ([10 * MIB], 10, 20),
        ([11 * MIB], 12, 20),
        ([21 * MIB], 22, 40),
        ([1, 21 * MIB], 24, 42),
        # One MiB that is left of a segment is no block of its own; with pages it is.
        ([19 * MIB, MIB + 1], 40, 40),
        ([11 * MIB, MIB + 1], 32, 20),
        ([10 * MIB + 512, MIB + 1], 12, 20),
        ([0], 0, 0),
    ],
)
def test_segments_by_the_published_rules(sizes, caching, expandable):
    alive = [(number, 99, size) for number, size in enumerate(sizes)]
    assert reserved("caching", *alive) == caching * MIB
    assert reserved("expandable", *alive) == expandable * MIB


def test_a_freed_block_serves_again_and_joins_its_neighbours():
    first = [(0, 9, 5 * MIB), (1, 9, 5 * MIB), (2, 9, 5 * MIB), (3, 9, 5 * MIB)]
    # All of the segment is free again, in whatever order its blocks were freed.
    for stops in ((4, 5, 6, 7), (7, 6, 5, 4), (4, 6, 5, 7), (5, 4, 7, 6)):
        freed = [(s, stop, b) for (s, _, b), stop in zip(first, stops, strict=True)]
        assert reserved("caching", *freed, (8, 9, 20 * MIB)) == 20 * MIB
    # One block in the middle keeps its neighbours apart.
    held = [(0, 4, 5 * MIB), (1, 9, 5 * MIB), (2, 4, 5 * MIB), (3, 4, 5 * MIB)]
    assert reserved("caching", *held, (8, 9, 10 * MIB)) == 20 * MIB
    assert reserved("caching", *held, (8, 9, 12 * MIB)) == 32 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    # Blocks of 40 and 30 MiB are free; 30 goes to the second, so that 40 finds the first.
    before = [(0, 2, 40 * MIB), (1, 3, 30 * MIB)]
    assert reserved("caching", *before, (4, 9, 30 * MIB), (5, 9, 40 * MIB)) == 70 * MIB
    # Where 39 of 40 is asked for, one MiB is not worth a split; of 38, two MiB are left to use.
    assert reserved("caching", (0, 1, 40 * MIB), (2, 9, 39 * MIB), (3, 9, MIB + 1)) == 60 * MIB
    assert reserved("caching", (0, 1, 40 * MIB), (2, 9, 38 * MIB), (3, 9, 2 * MIB)) == 40 * MIB


def test_expandable_segments_grow_behind_what_is_free_at_their_end():
    growing = [(0, 1, 40 * MIB), (2, 3, 60 * MIB), (4, 5, 100 * MIB)]
    assert reserved("caching", *growing) == 200 * MIB
    assert reserved("expandable", *growing) == 100 * MIB
    # What lives at the end keeps the free bytes before it from growing.
    assert reserved("expandable", (0, 2, 40 * MIB), (1, 9, 20 * MIB), (3, 9, 60 * MIB)) == 120 * MIB


blocks = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 60 * MIB)), max_size=40
).map(lambda rows: trace(*((s, s + n, b) for s, n, b in rows)))


@given(blocks)
def test_no_allocator_takes_less_than_is_needed(one):
    for allocator in ("caching", "expandable"):
        found = memo.emulate(one, allocator=allocator)
        assert found.reserved_bytes >= found.needed_bytes == one.load_bytes
        # A second step of the same kind needs nothing new.
        again = memo.emulate([one, one], allocator=allocator)
        assert again.reserved_bytes >= found.reserved_bytes


def step(tokens, layers=4):
    """Tensors of one step that grow with its tokens: kept ones, and one that lives in its layer."""
    events = []
    for layer in range(layers):
        events += [
            ("alloc", ("kept", layer), 6000 * tokens),
            ("alloc", ("inner", layer), 9000 * tokens),
        ]
        events += [("free", ("inner", layer))]
    for layer in reversed(range(layers)):
        events += [("alloc", ("grad", layer), 9000 * tokens), ("free", ("kept", layer))]
        events += [("free", ("grad", layer))]
    return memo.Trace.from_events(events)


def test_ascending_lengths_fragment_and_a_plan_does_not():
    steps = [step(1000 * length) for length in range(20, 33, 2)]
    needed = max(one.load_bytes for one in steps)
    ascending = memo.emulate(steps)
    assert ascending.needed_bytes == needed
    assert ascending.overhead > 2
    assert memo.emulate(steps[::-1]).overhead < 1.5
    assert memo.emulate(steps, "expandable").overhead < ascending.overhead
    planned = memo.emulate(steps, "planned")
    assert planned.allocator == "planned"
    assert planned.overhead <= 1.02


@pytest.mark.unchecked
def test_unknown_allocators_and_no_traces_are_refused():
    with pytest.raises(
        ConfigError, match="expected one of caching, expandable, planned, got 'jemalloc'"
    ):
        memo.emulate(trace(), allocator="jemalloc")
    for none in ([], "trace.csv", 3):
        with pytest.raises(
            ConfigError, match=r"expected at least one trace, each a memo.Trace, got"
        ):
            memo.emulate(none)
    assert memo.emulate(trace()).overhead == 1


def test_an_allocator_from_outside_is_taken():
    ALLOCATORS.add("wasteful", lambda traces: 10 * traces[0].load_bytes, "ten times the need")
    try:
        assert memo.emulate(trace((0, 1, 100)), allocator="wasteful").overhead == 10
    finally:
        ALLOCATORS.remove("wasteful")
