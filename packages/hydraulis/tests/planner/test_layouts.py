"""Boxes of replicas: DTensor's own shards, and transfers that move no byte too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import hydraulis as hy
from shared.comms import reshard
from shared.errors import ConfigError
from shared.topology.boxes import Box


@st.composite
def layouts(draw):
    """Shape, dimension, replicas, ranks in all."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    num_ranks = draw(st.integers(1, 7))
    ranks = draw(st.permutations(range(num_ranks)))
    replicas = []
    while ranks and (not replicas or draw(st.booleans())):
        count = draw(st.integers(1, len(ranks)))
        replicas.append(ranks[:count])
        ranks = ranks[count:]
    return shape, draw(st.integers(-len(shape), len(shape) - 1)), replicas, num_ranks


def count_holders(shape, boxes):
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        held[box.within(Box((0,) * len(shape), tuple(shape)))] += 1
    return held


@given(layouts())
def test_each_replica_holds_each_element_once(drawn):
    shape, dim, replicas, num_ranks = drawn
    boxes = hy.layout_boxes(shape, dim, replicas, num_ranks)
    assert len(boxes) == num_ranks
    for replica in replicas:
        assert (count_holders(shape, [boxes[rank] for rank in replica]) == 1).all()
    for rank in set(range(num_ranks)) - {rank for replica in replicas for rank in replica}:
        assert boxes[rank].numel == 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 9))
def test_a_replica_is_sharded_as_by_dtensor(shape, dim, count):
    dim %= len(shape)
    boxes = hy.layout_boxes(shape, dim, [range(count)], count)
    for rank, box in enumerate(boxes):
        size, offset = Shard.local_shard_size_and_offset(shape[dim], count, rank)
        assert (box.sizes[dim], box.offsets[dim]) == (size, offset)
        others = [d for d in range(len(shape)) if d != dim]
        assert [box.sizes[d] for d in others] == [shape[d] for d in others]
        assert not any(box.offsets[d] for d in others)


@given(layouts())
def test_transfers_from_the_optimizer_layout_send_what_is_missing_once(drawn):
    shape, dim, replicas, num_ranks = drawn
    held = hy.layout_boxes(shape, 0, [range(num_ranks)], num_ranks)
    wanted = hy.layout_boxes(shape, dim, replicas, num_ranks)
    transfers = reshard.plan([[one] for one in held], [[one] for one in wanted], itemsize=4)
    # By brute force: a rank must receive each element that it wants and does not hold, and each once.
    missing = sum(
        int((count_holders(shape, [wanted[r]]) > count_holders(shape, [held[r]])).sum())
        for r in range(num_ranks)
    )
    assert sum(reshard.sent_bytes(transfers, 4, num_ranks)) == 4 * missing
    for rank in range(num_ranks):
        arrived = count_holders(shape, [box for _, dst, box in transfers if dst == rank])
        assert (arrived == count_holders(shape, [wanted[rank]])).all()
        for src, dst, box in transfers:
            if dst == rank:
                assert (count_holders(shape, [box]) <= count_holders(shape, [held[src]])).all()


@pytest.mark.parametrize(
    ("shape", "dim", "replicas", "num_ranks", "told"),
    [
        ((4, 4), 2, [[0]], 1, r"got \[4, 4\] and dim 2"),
        ((), 0, [[0]], 1, r"got \[\] and dim 0"),
        ((4, -1), 0, [[0]], 1, r"got \[4, -1\] and dim 0"),
        ((4,), 0, [[0, 1], [1]], 2, r"from 0 to 1, at least one each, got \[\[0, 1\], \[1\]\]"),
        ((4,), 0, [[2]], 2, r"got \[\[2\]\]"),
        ((4,), 0, [[0], []], 2, r"got \[\[0\], \[\]\]"),
    ],
)
def test_layouts_that_make_no_sense_are_named(shape, dim, replicas, num_ranks, told):
    with pytest.raises(ConfigError, match=told):
        hy.layout_boxes(shape, dim, replicas, num_ranks)


def test_layouts_are_what_resharding_takes():
    rows = hy.layout_boxes((6, 4), 0, [range(2)], 2)
    columns = hy.layout_boxes((6, 4), 1, [[1, 0]], 2)
    transfers = reshard.plan(rows, columns, 4)
    assert transfers == reshard.plan([[box] for box in rows], [[box] for box in columns], 4)
    assert sum(one.box.numel for one in transfers) == 24
    assert reshard.sent_bytes(transfers, 4, 2) == [24, 24]
