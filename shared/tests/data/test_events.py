"""Lists of events are checked when made, and keep rows together through all that is done to them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data.events import Events
from shared.errors import DataError


def rows(events):
    columns = [events.src, events.dst, events.t, events.eid]
    if events.features is not None:
        columns.append(events.features[:, 0])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def made(times, dtype=torch.int64, num_features=1):
    n = len(times)
    features = torch.arange(n * num_features, dtype=torch.float32).reshape(n, num_features)
    return Events(range(n), range(n, 2 * n), torch.tensor(times, dtype=dtype), None, features)


def test_takes_lists_arrays_and_tensors_and_keeps_wide_types():
    events = Events(
        [1, 2], np.array([3, 4], np.int32), torch.tensor([0.5, 1.5]), features=np.ones((2, 3))
    )
    assert (events.src.dtype, events.dst.dtype, events.eid.dtype) == (torch.int64,) * 3
    assert events.t.dtype == torch.float64
    assert events.features.dtype == torch.float32
    assert events.eid.tolist() == [0, 1]
    assert (len(events), events.num_nodes) == (2, 5)
    assert Events([6, 7], [3, 4], [0, 1]).num_nodes == 8
    late = 2**60 + 1
    assert Events([0], [1], [late]).t.tolist() == [late]


def test_shares_memory_with_tensors_of_the_right_type():
    src = torch.tensor([1, 2, 3])
    events = Events(src, src, src)
    assert events.src.data_ptr() == src.data_ptr()
    assert events[1:].src.data_ptr() == src[1:].data_ptr()


def test_copies_what_torch_cannot_use(recwarn):
    numbers = np.arange(3)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    events = Events(numbers[::-1], frozen, numbers)
    assert events.src.tolist() == [2, 1, 0]
    assert events.dst.data_ptr() != frozen.__array_interface__["data"][0]
    assert not recwarn.list


def test_no_events_are_events():
    events = Events([], [], [])
    assert (len(events), events.num_nodes, events.is_sorted) == (0, 0, True)
    assert len(Events.concat([events, events]).sorted()) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dst": [1]}, "expected one dst for each src, got 1 for 2"),
        (
            {"dst": np.array([1, 2**63 + 5], np.uint64)},
            r"dst of event 1: expected less than 2\^63, got 9223372036854775813; number the nodes",
        ),
        ({"t": [1, 2, 3]}, "expected one t for each src, got 3 for 2"),
        ({"eid": [1]}, "expected one eid for each src"),
        ({"features": [[1.0]]}, "expected one features for each src"),
        ({"src": [0, -1]}, "src of event 1: expected 0 or more, got -1"),
        ({"src": [0.0, 1.0]}, "src: expected whole numbers, got torch.float"),
        ({"src": [False, True]}, "src: expected whole numbers, got torch.bool"),
        ({"dst": ["a", "b"]}, "dst: expected numbers"),
        ({"src": [[0], [1]]}, r"src: expected one number an event, got shape \[2, 1\]"),
        ({"t": [1.0, float("nan")]}, "t of event 1: expected a finite time of at least 0, got nan"),
        ({"t": [float("inf"), 1.0]}, "t of event 0: expected a finite time"),
        ({"t": [5, -5]}, "t of event 1: expected a finite time of at least 0, got -5"),
        ({"t": [1j, 2j]}, "t: expected real numbers, got torch.complex"),
        ({"src": [[0, 1], [1]]}, "src: expected numbers, .*convert them first"),
        ({"t": [True, False]}, "t: expected numbers, got torch.bool"),
        ({"features": [[1.0, 2.0], [3.0, float("inf")]]}, "features of event 1, column 1"),
        ({"features": [1.0, 2.0]}, "features: expected one row of numbers an event"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(DataError, match=message):
        Events(**({"src": [0, 1], "dst": [1, 0], "t": [1, 2]} | changes))


@given(st.lists(st.integers(0, 5)), st.data())
def test_rows_stay_together(times, data):
    events = made(times)
    expected = rows(events)
    start = data.draw(st.integers(0, len(times)))
    assert rows(events[start:]) == expected[start:]
    chosen = data.draw(st.lists(st.integers(0, len(times) - 1))) if times else []
    index = torch.tensor(chosen, dtype=torch.int64)
    assert rows(events[index]) == [expected[i] for i in chosen]
    assert rows(events[events.t.numpy() > 2]) == [row for row in expected if row[2] > 2]
    assert rows(Events.concat([events[start:], events[:start]])) == (
        expected[start:] + expected[:start]
    )
    # Python's sort is stable too.
    assert rows(events.sorted()) == sorted(expected, key=lambda row: row[2])
    assert events.sorted().is_sorted
    assert events.is_sorted == (times == sorted(times))


def test_one_position_is_no_list():
    with pytest.raises(DataError, match=r"events\[1\]: expected a slice, such as \[1:2\]"):
        made([1, 2])[1]


def test_concat_refuses_what_does_not_fit_and_keeps_a_common_label():
    with pytest.raises(DataError, match="expected at least one"):
        Events.concat([])
    for other in (made([1], torch.float64), made([1], num_features=2), Events([0], [1], [1])):
        with pytest.raises(DataError, match="expected lists of one kind"):
            Events.concat([made([1]), other])
    one, two = Events([0], [1], [1], label="a"), Events([0], [1], [1], label="b")
    assert Events.concat([one, one[:0]]).label == "a"
    assert Events.concat([one, two]).label == ""


def test_digest_tells_every_column_and_the_type_of_time():
    base = {"src": [0, 1], "dst": [1, 0], "t": [1, 2], "eid": [0, 1]}
    changes = [{}, {"src": [1, 1]}, {"dst": [1, 1]}, {"t": [1, 3]}, {"eid": [1, 0]}]
    changes.append({"t": [1.0, 2.0]})
    assert len({Events(**(base | change)).digest() for change in changes}) == len(changes)
    assert Events(**base).digest() == Events(**base).digest()
    # A slice with steps is not contiguous, and is what its values are.
    assert Events(range(4), range(4), range(4))[::2].digest() == (
        Events([0, 2], [0, 2], [0, 2], [0, 2]).digest()
    )


def test_rows_by_id_are_found_by_id():
    features = np.arange(8, dtype=np.float32).reshape(4, 2)
    events = Events(range(4), range(4), range(4), [3, 1, 6, 0], features)
    rows = events.rows_by_id()
    assert rows is not None
    assert torch.equal(rows[events.eid], events.features)
    assert not rows[[2, 4, 5]].any()
    in_order = Events(range(4), range(4), range(4), None, features)
    assert in_order.rows_by_id() is in_order.features
    assert Events([0], [1], [2]).rows_by_id() is None
    with pytest.raises(DataError, match="ids up to 999999"):
        Events([0], [1], [2], [999_999], [[1.0]]).rows_by_id()


def test_digest_tells_features():
    plain, other = (Events([0], [1], [2], None, [[x]]) for x in (1.0, 2.0))
    assert plain.digest() != other.digest() != Events([0], [1], [2]).digest()
    # As many bytes, of another shape.
    wide = Events([0], [0], [0], [0], [[0.0] * 8])
    assert wide.digest() != Events([0, 0], [0, 0], [0, 0], [0, 0]).digest()
