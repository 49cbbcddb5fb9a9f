import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lancet.graph.reachability import find_ancestors, find_descendants, to_bits, to_mask


@st.composite
def dependencies(draw):
    return [
        draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        for number in range(draw(st.integers(1, 70)))
    ]


@given(dependencies())
def test_reachability_is_that_of_powers_of_the_matrix(needs):
    num_ops = len(needs)
    follows = np.zeros((num_ops, num_ops), dtype=bool)
    for i, needed in enumerate(needs):
        follows[i, needed] = True
    reach = follows
    for _ in range(num_ops.bit_length()):
        reach = reach | reach @ reach
    ancestors, descendants = find_ancestors(needs), find_descendants(needs)
    assert (np.array([to_mask(bits, num_ops) for bits in ancestors]) == reach).all()
    assert (np.array([to_mask(bits, num_ops) for bits in descendants]) == reach.T).all()


@given(st.sets(st.integers(0, 40)))
def test_sets_become_arrays(numbers):
    mask = to_mask(to_bits(numbers), 41)
    assert mask.dtype == bool
    assert set(np.flatnonzero(mask).tolist()) == numbers
