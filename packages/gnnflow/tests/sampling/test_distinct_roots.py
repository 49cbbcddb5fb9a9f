"""Roots that repeat, found against a list of those seen before."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.sampling.distinct_roots import find_distinct_roots, find_distinct_sequences, find_rows
from gnnflow.sampling.mfg import Sequences, TemporalBlock


@given(st.lists(st.integers(0, 9)))
def test_rows_of_an_index(values):
    index = torch.tensor(values, dtype=torch.int64)
    distinct, place = find_rows(index, 10)
    assert distinct.tolist() == sorted(set(values))
    assert torch.equal(distinct[place], index)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(5, 6), st.lists(st.integers(0, 1), max_size=2)),
        max_size=12,
    ),
    st.booleans(),
)
def test_distinct_roots_are_those_no_earlier_root_equals(roots, is_float):
    """Also where equal roots were given other neighbours, which a sampler does not do."""
    nodes, times, sampled = zip(*roots, strict=True) if roots else ((), (), ())
    dtype = torch.float64 if is_float else torch.int64
    row = [at for at, neighbors in enumerate(sampled) for _ in neighbors]
    neighbors = torch.tensor([n for found in sampled for n in found], dtype=torch.int64)
    times = torch.tensor(times, dtype=dtype)
    block = TemporalBlock(
        torch.tensor(nodes, dtype=torch.int64), times, neighbors, neighbors.to(dtype),
        times[row] - neighbors.to(dtype), neighbors, torch.tensor(row, dtype=torch.int64),
    )  # fmt: skip
    first = [roots.index(root) for root in roots]
    kept, place = find_distinct_roots(block)
    # A root that differs from the first of its node and time is not compared with others.
    assert torch.equal(kept, kept.unique())
    assert all(roots[at] == roots[kept[to]] for at, to in enumerate(place.tolist()))
    leaders = {roots[at][:2]: roots[at] for at in reversed(range(len(roots)))}
    repeats = [
        at for at in range(len(roots)) if first[at] < at and leaders[roots[at][:2]] == roots[at]
    ]
    assert kept.tolist() == [at for at in range(len(roots)) if at not in repeats]


def test_roots_whose_neighbours_differ_in_one_respect_are_two():
    same = {
        "roots": [4, 4], "root_times": [9, 9], "nodes": [1, 1], "times": [7, 7], "dt": [2, 2],
        "eids": [3, 3], "row": [0, 1],
    }  # fmt: skip
    assert find_distinct_roots(TemporalBlock(*map(torch.tensor, same.values())))[0].tolist() == [0]
    for name in ("nodes", "times", "eids"):
        differing = {**same, name: [same[name][0], 5]}
        kept, place = find_distinct_roots(TemporalBlock(*map(torch.tensor, differing.values())))
        assert (kept.tolist(), place.tolist()) == ([0, 1], [0, 1]), name


def test_roots_whose_keys_collide_are_two():
    # The key is a sum of products modulo 2^64, so that times exist that make up for another node.
    a, b = -0x61C8864680B583EB, -0x3D4D51C2D82B14B1
    step = -a * pow(b, -1, 2**64) % 2**64
    step = step if step < 2**63 else step - 2**64
    nodes, times = torch.tensor([7, 8, 7]), torch.tensor([max(0, -step)] * 3)
    times[1] += step
    keys = nodes * a + times * b
    assert keys[0] == keys[1]
    none = torch.empty(0, dtype=torch.int64)
    kept, place = find_distinct_roots(TemporalBlock(nodes, times, none, none, none, none, none))
    assert (kept.tolist(), place.tolist()) == ([0, 1], [0, 1, 0])


def test_distinct_sequences():
    block = TemporalBlock(*map(torch.tensor, ([4, 4, 5, 4], [9, 9, 9, 8], [1, 1, 1], [2, 2, 2])),
                          *map(torch.tensor, ([7, 7, 7], [3, 3, 3], [0, 1, 2])))  # fmt: skip
    kept, place = find_distinct_sequences(Sequences.of(block, 2))
    assert kept.tolist() == [0, 2, 3]
    assert place.tolist() == [0, 0, 1, 2]
    other = Sequences.of(block, 2)
    other.eids[1, 1] = 6
    assert find_distinct_sequences(other)[0].tolist() == [0, 1, 2, 3]
