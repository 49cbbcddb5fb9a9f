"""Boxes against sets of elements: every operation is counted out on small tensors."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.topology import Box, decompose, intersect, subtract


def elements(box: Box) -> set[tuple[int, ...]]:
    axes = (range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*axes))


@st.composite
def pairs_of_boxes(draw):
    ndim = draw(st.integers(0, 3))
    numbers = st.tuples(*[st.integers(0, 4)] * ndim)
    return tuple(Box(draw(numbers), draw(numbers)) for _ in range(2))


@st.composite
def flat_ranges(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(pairs_of_boxes())
def test_intersection_holds_what_both_hold(boxes):
    a, b = boxes
    both = intersect(a, b)
    assert (elements(both) if both else set()) == elements(a) & elements(b)
    assert both is None or both.numel > 0


@given(pairs_of_boxes())
def test_difference_is_disjoint_and_exact(boxes):
    a, b = boxes
    left = subtract(a, b)
    assert all(box.numel for box in left)
    assert len(left) <= max(2 * len(a.sizes), 1)
    assert sum(box.numel for box in left) == len(elements(a) - elements(b))
    assert set().union(*map(elements, left)) == elements(a) - elements(b)


@given(flat_ranges())
def test_flat_range_is_cut_into_contiguous_boxes_in_order(flat_range):
    shape, start, stop = flat_range
    boxes = decompose(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    whole = Box((0,) * len(shape), shape)
    found = [numbers[box.within(whole)].ravel() for box in boxes]
    assert np.concatenate([[], *found]).tolist() == list(range(start, stop))


def test_every_range_of_a_small_tensor_needs_no_more_boxes_than_it_must():
    shape = (2, 3, 2)
    counts = {
        (start, stop): len(decompose(shape, start, stop))
        for start in range(13)
        for stop in range(start, 13)
    }
    assert counts[0, 12] == counts[6, 12] == counts[2, 4] == counts[0, 1] == 1
    assert counts[1, 11] == 2 * 3 - 1 - 1
    assert counts[1, 12] == 3
    assert max(counts.values()) == 4


@pytest.mark.parametrize("ndim", range(1, 6))
def test_bound_on_boxes_is_met(ndim):
    shape = (4,) * ndim
    assert len(decompose(shape, 1, 4**ndim - 1)) == 2 * ndim - 1


def test_no_dimension_is_one_element():
    assert decompose((), 0, 1) == [Box((), ())]
    assert decompose((), 0, 0) == []
    assert Box((), ()).numel == 1
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert subtract(Box((), ()), Box((), ())) == []


def test_empty_tensor_has_no_boxes():
    assert decompose((3, 0, 2), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_range_outside_the_tensor(start, stop):
    with pytest.raises(DataError, match=r"within \[0, 6\)"):
        decompose((2, 3), start, stop)


def test_slices_are_relative_to_the_outer_box():
    outer, inner = Box((2, 4), (3, 5)), Box((3, 4), (1, 2))
    assert inner.within(outer) == (slice(1, 2), slice(0, 2))
