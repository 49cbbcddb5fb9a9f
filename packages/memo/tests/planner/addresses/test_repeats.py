"""Repeated layers: found in the order of sizes, and packed once."""

import itertools

import numpy as np

import memo
from memo.planner.addresses.problem import AllocationProblem, check_addresses
from memo.planner.addresses.repeats import find_repeats, pack_by_repeats


def layers(num):
    """A forward and a backward of layers, each with tensors that live in one pass."""
    events, keys = [], itertools.count()

    def one_pass(kept):
        a, b, c = next(keys), next(keys), next(keys)
        events.extend([("alloc", a, 40), ("alloc", b, 70), ("alloc", kept, 30), ("free", a)])
        events.extend([("alloc", c, 90), ("free", b), ("free", c)])

    for layer in range(num):
        one_pass(f"kept {layer}")
    for layer in reversed(range(num)):
        a, b = next(keys), next(keys)
        events.extend([("alloc", a, 100), ("alloc", b, 60), ("free", a), ("free", f"kept {layer}")])
        events.append(("free", b))
    return memo.Trace.from_events(events)


def test_repeated_layers_are_found_and_packed_once():
    trace = layers(12)
    start, stop, size = np.array(sorted(trace.intervals)).T
    forward, backward = sorted(find_repeats(size))
    assert (forward[1], forward[2]) == (4, 12)
    assert (backward[1], backward[2]) == (2, 12)
    problem = AllocationProblem.from_times(start, stop, size)
    packed = []

    def pack_one(inside):
        packed.append(len(inside))
        return memo.pack(zip(inside.start, inside.stop, inside.size, strict=True), align=1).offsets

    def pack_all(outer):
        return memo.pack(zip(outer.start, outer.stop, outer.size, strict=True), align=1).offsets

    offsets = pack_by_repeats(problem, pack_one, pack_all)
    check_addresses(problem.start, problem.stop, problem.size, offsets)
    assert sorted(packed) == [2, 3]  # once a kind of pass, not once a layer
    assert memo.pack(trace, align=1).is_optimal


def test_two_of_a_kind_are_enough():
    assert find_repeats(np.array([5, 7, 9, 5, 7, 9])) == [(0, 3, 2)]


def test_without_layers_there_is_nothing_to_fold():
    problem = AllocationProblem.from_times(np.arange(6), np.arange(6) + 2, np.arange(1, 7))
    assert find_repeats(problem.size) == []
    assert pack_by_repeats(problem, lambda p: p.start, lambda p: p.start) is None
