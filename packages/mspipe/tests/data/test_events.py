"""A list of events holds what it was given, in order of time; what is unusable is named."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.data.events import Events
from shared.errors import DataError

TEN = Events(range(10), range(1, 11), range(10), [[float(i)] for i in range(10)], label="ten")


def test_takes_lists_arrays_and_tensors():
    from_arrays = Events(
        np.array([0, 1], np.int32), np.array([5, 3], np.uint8), np.array([1, 2], np.float32)
    )
    from_tensors = Events(torch.tensor([0, 1]), torch.tensor([5, 3]), torch.tensor([1.0, 2.0]))
    for events in (Events([0, 1], [5, 3], [1.0, 2.0]), from_arrays, from_tensors):
        assert (events.src.dtype, events.t.dtype) == (torch.int64, torch.float64)
        assert events.dst.tolist() == [5, 3]
        assert events.eid.tolist() == [0, 1]
        assert (events.num_nodes, events.edge_dim, len(events)) == (6, 0, 2)
    assert Events([0], [0], [2**53 + 1]).t.tolist() == [2**53 + 1]
    nothing = Events([], [], [])
    assert (len(nothing), nothing.num_nodes, nothing.src.dtype) == (0, 0, torch.int64)


def test_takes_arrays_that_run_backwards_and_ones_that_are_read_only(recwarn):
    down = np.arange(3)[::-1]
    frozen = np.arange(3)
    frozen.flags.writeable = False
    events = Events(down, frozen, frozen, np.eye(3)[::-1])
    assert events.src.tolist() == [2, 1, 0]
    assert events.features.tolist() == np.eye(3)[::-1].tolist()
    assert not recwarn.list


def test_features_carry_no_gradients():
    rows = torch.ones(1, 2, requires_grad=True)
    assert not Events([0], [1], [2], rows).features.requires_grad


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20))
def test_sort_is_by_time_and_keeps_ties(rows):
    src, t = [list(column) for column in zip(*rows, strict=True)] if rows else ([], [])
    places = list(range(len(rows)))
    events = Events(src, places, t, [[float(i)] for i in places] or None, sort=True)
    expected = sorted(places, key=lambda at: t[at])
    assert events.dst.tolist() == expected
    assert events.src.tolist() == [src[at] for at in expected]
    assert events.t.tolist() == sorted(t)
    assert events.eid.tolist() == places
    if rows:
        assert events.features[events.eid, 0].tolist() == expected


def test_slices_keep_ids_and_share_features():
    part = TEN[3:7]
    assert part.eid.tolist() == part.src.tolist() == [3, 4, 5, 6]
    assert part.features is TEN.features
    assert part.features[part.eid].flatten().tolist() == [3, 4, 5, 6]
    assert part.label == "ten"
    assert part.src.data_ptr() == TEN.src[3:].data_ptr()
    assert part[1:][:2].eid.tolist() == [4, 5]
    assert TEN[-2:].eid.tolist() == [8, 9]
    assert len(TEN[7:3]) == 0


def test_a_digest_tells_lists_apart():
    columns = {"src": [0, 1], "dst": [2, 3], "t": [5, 6], "features": [[1.0], [2.0]]}
    digest = Events(**columns).digest()
    assert Events(**columns).digest() == digest
    changes = {"src": [1, 1], "dst": [2, 2], "t": [5, 7], "features": [[1.0], [3.0]]}
    others = {Events(**(columns | {name: value})).digest() for name, value in changes.items()}
    others |= {Events([0, 1], [2, 3], [5, 6]).digest(), TEN[2:5].digest(), TEN[2:6].digest()}
    assert len(others | {digest}) == 8
    same_part = Events(range(10), range(1, 11), range(10), [[float(min(i, 5))] for i in range(10)])
    assert same_part[2:5].digest() == TEN[2:5].digest(), "features of other events are no matter"
    assert same_part[6:9].digest() != TEN[6:9].digest()


@given(st.lists(st.floats(0, 0.3), max_size=3))
def test_split_cuts_without_loss(shares):
    parts = TEN.split(*shares)
    assert len(parts) == len(shares) + 1
    assert torch.cat([part.eid for part in parts]).tolist() == list(range(10))
    for part, share in zip(parts, shares, strict=False):
        assert abs(len(part) - 10 * share) <= 1


def test_split_of_usual_shares():
    assert [len(part) for part in TEN.split(0.7, 0.15)] == [7, 1, 2]
    assert [len(part) for part in TEN.split(0.7, 0.2, 0.1)] == [7, 2, 1, 0]


@pytest.mark.parametrize("shares", [(-0.1,), (0.7, 0.4), (float("nan"),)])
def test_split_refuses(shares):
    with pytest.raises(DataError, match="split: expected shares of 0 or more, at most 1 together"):
        TEN.split(*shares)


@pytest.mark.parametrize("which", [3, slice(None, None, 2), slice(None, None, -1)])
def test_slices_refused(which, unchecked):
    with pytest.raises(DataError, match=r"expected a slice of step 1, such as \[0:100\]"):
        TEN[which]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([0, 1], [1], [1, 2]), "expected one dst for each src, got 1 for 2"),
        (([0], [1], [1, 2]), "expected one t for each src, got 2 for 1"),
        (([-1], [1], [1]), "src of event 0: expected 0 or more, got -1"),
        (([0, 0], [1, -7], [1, 2]), "dst of event 1: expected 0 or more, got -7"),
        (([0.5], [1], [1]), "src: expected whole numbers, got torch.float64"),
        (([0], [True], [1]), "dst: expected whole numbers, got torch.bool"),
        ((["a"], [1], [1]), "src: expected (an array of )?numbers"),
        (([[0], [1, 2]], [1], [1]), "src: expected (an array of )?numbers"),
        (([[0]], [1], [1]), r"src: expected one number an event, got shape \[1, 1\]"),
        ((0, [1], [1]), r"src: expected one number an event, got shape \[\]"),
        (([0], [1], [[1]]), r"t: expected one number an event, got shape \[1, 1\]"),
        (
            ([0], [1], [-1]),
            "t of event 0: expected a finite time of at least 0, got -1; count from",
        ),
        (([0] * 2, [1] * 2, [1, float("nan")]), "t of event 1: expected a finite time .* got nan"),
        (([0], [1], [float("inf")]), "t of event 0: expected a finite time .* got inf"),
        (([0], [1], [True]), "t: expected numbers, got torch.bool"),
        (([0], [1], [1j]), "t: expected real numbers, got torch.complex128"),
        (([0] * 3, [1] * 3, [2, 5, 4]), r"event 2 is earlier .* \(4 after 5\); give sort=True"),
        (
            ([0], [1], [1], [1.0]),
            r"features: expected one row of numbers an event, got shape \[1\]",
        ),
        (([0], [1], [1], [[1.0]] * 2), "expected one features for each src, got 2 for 1"),
        (
            ([0], [1], [1], [[1.0, float("inf")]]),
            "features of event 0, column 1: expected a finite number, got inf",
        ),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(DataError, match=message):
        Events(*fields)
