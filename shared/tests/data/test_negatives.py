"""Words are those of their counters in any batches; searches find what a walk along the range finds."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data.negatives import draw_words, first_not_before
from shared.kernels.philox import philox


def test_a_word_depends_on_event_and_draw_alone():
    eid = torch.tensor([5, 2**33 + 1, 0])
    words = draw_words(eid, 4, 77)
    assert words.shape == (3, 4, 4)
    counter = torch.tensor([1, 2, 3, 0])  # low and high half of the id, number of the draw
    assert torch.equal(words[1, 3], philox(counter, 77))
    assert torch.equal(draw_words(eid.flip(0), 2, 77), words.flip(0)[:, :2])
    assert len(words.unique()) > 40
    assert not torch.equal(draw_words(eid, 4, 78), words)
    assert draw_words(eid[:0], 4, 77).shape == (0, 4, 4)
    assert draw_words(eid, 0, 77).shape == (3, 0, 4)


@given(st.lists(st.integers(0, 9), max_size=20), st.data())
def test_first_not_before_is_where_a_walk_stops(times, data):
    times = np.array(sorted(times), np.int64)
    place = st.integers(0, len(times))
    ranges = data.draw(st.lists(st.tuples(place, place, st.integers(-1, 10)), max_size=6))
    begin, end, bound = np.array(ranges, np.int64).reshape(-1, 3).T
    end = np.maximum(begin, end)
    expected = [
        next((at for at in range(a, b) if times[at] >= t), b)
        for a, b, t in zip(begin, end, bound, strict=True)
    ]
    assert first_not_before(times, begin, end, bound).tolist() == expected
