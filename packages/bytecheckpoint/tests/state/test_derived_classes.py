"""Containers of derived classes: they come back as they were, or are refused when saved."""

import collections
import copy
import math

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from shared.errors import DataError


class Words(dict):
    """A class of the user's."""


Pair = collections.namedtuple("Pair", ["first", "second"])


class Holder:
    """What saves itself and keeps any value."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def is_same(one, other):
    """Whether values, their classes, the order of keys and what defaultdicts make are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        factories = [getattr(value, "default_factory", None) for value in (one, other)]
        return (
            list(one) == list(other)
            and factories[0] is factories[1]
            and all(is_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


KNOWN = {
    "Counter": collections.Counter("aab"),
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "OrderedDict of numbers": collections.OrderedDict({2: "x", 1: "y"}),
    "defaultdict of numbers": collections.defaultdict(int, x=1),
    "defaultdict of Counters": collections.defaultdict(
        collections.Counter, x=collections.Counter("z")
    ),
    "defaultdict of nothing": collections.defaultdict(None, {1: 2}),
    "Size": torch.Size([2, 3]),
    "nested": {"a": (collections.Counter("a"), [collections.OrderedDict(z=torch.ones(2))])},
}


@pytest.mark.parametrize("value", KNOWN.values(), ids=KNOWN)
def test_known_classes_come_back_wherever_they_are(tmp_path, value):
    holder, state = Holder(), {"h": Holder(), "plain": {"x": None}, "same": copy.deepcopy(value)}
    state["h"] = holder
    bcp.save(tmp_path / "c", {"h": Holder(value), "plain": {"x": value}, "same": value})
    bcp.load(tmp_path / "c", state)
    for loaded in (holder.value, state["plain"]["x"], state["same"]):
        assert is_same(loaded, value)


def test_a_value_of_another_class_is_replaced(tmp_path):
    words, sizes = collections.Counter("aab"), torch.Size([2, 3])
    bcp.save(tmp_path / "c", {"x": {"words": words, "pair": (1, 2), "size": sizes}})
    state = {"x": {"words": {"stale": 1}, "pair": [0, 0], "size": (2, 3)}}
    bcp.load(tmp_path / "c", state)
    assert is_same(state["x"], {"words": words, "pair": (1, 2), "size": sizes})


def test_dictionaries_get_the_order_that_was_saved(tmp_path):
    order = collections.OrderedDict(b=1, a=2)
    bcp.save(tmp_path / "c", {"x": {"order": order}})
    state = {"x": {"order": collections.OrderedDict(later=0, a=2, b=1)}}
    bcp.load(tmp_path / "c", state)
    assert is_same(state["x"]["order"], order)


class Range(tuple):
    """A class of tuples that is made of two numbers."""

    def __new__(cls, low, high):
        return super().__new__(cls, (low, high))


def test_tuples_that_cannot_be_made_are_refused_before_anything_is_loaded(tmp_path):
    bcp.save(tmp_path / "c", {"t": torch.ones(2), "x": {"y": Range(1, 2)}})
    state = {"t": torch.zeros(2), "x": {"y": Range(1, 3)}}
    with pytest.raises(
        DataError, match=r"x\.y: expected a tuple whose class takes its items, got Range: .*plain"
    ):
        bcp.load(tmp_path / "c", state)
    assert is_same(state, {"t": torch.zeros(2), "x": {"y": Range(1, 3)}})


def test_a_scheduler_with_counted_milestones_goes_on(tmp_path):
    def build():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])

    optimizer, scheduler = build()
    bcp.save(tmp_path / "c", {"o": optimizer, "s": scheduler})
    optimizer, scheduler = build()
    bcp.load(tmp_path / "c", {"o": optimizer, "s": scheduler})
    assert type(scheduler.milestones) is collections.Counter
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([1e-3])


REFUSED = {
    "own dict": (Words(a=1), r"h\.value: .* got a .*Words, .*load_state_dict"),
    "namedtuple": (Pair(1, 2), r"h\.value: .* got a .*Pair"),
    "lambda": (collections.defaultdict(lambda: 5), r"h\.value: .*collections.defaultdict"),
    "derived Counter": (type("Tally", (collections.Counter,), {})("a"), r"h\.value: .*Tally"),
    "inside": ({"a": [Words()]}, r"h\.value\.a\.0: .*Words"),
    "masked": (np.ma.masked_array([1, 2], mask=[0, 1]), r"h\.value: .*MaskedArray"),
    "records": (np.rec.array([(1, 2)]), r"h\.value: .*recarray"),
    "backwards": (np.arange(4)[::-1], r"h\.value: .*ascontiguousarray"),
    "nan as a key": ({math.nan: 1}, r"h\.value: expected keys .* got nan"),
    "nan of numpy": ({np.float32("nan"): 1}, r"h\.value: expected keys .* got nan"),
    "byte order": (np.arange(4, dtype=">i4"), r"h\.value: .*byte order.*newbyteorder"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_an_object_gives_is_refused_where_it_could_not_come_back(tmp_path, value, message):
    with pytest.raises(DataError, match=message):
        bcp.save(tmp_path / "c", {"h": Holder(value)})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("value", "stale"),
    [
        (Words(a=1, b=2), Words(a=0)),
        (Words(a=1), Words()),
        (Pair(1, [2]), Pair(0, [0])),
        (collections.defaultdict(lambda: 5, a=1), collections.defaultdict(lambda: 6)),
    ],
    ids=["own dict", "empty", "namedtuple", "lambda"],
)
def test_own_classes_are_filled_where_the_state_has_one(tmp_path, value, stale):
    bcp.save(tmp_path / "c", {"t": torch.ones(2), "x": {"y": value}})
    state = {"t": torch.zeros(2), "x": {"y": stale}}
    bcp.load(tmp_path / "c", state)
    assert type(state["x"]["y"]) is type(value)
    assert state["x"]["y"] == value
    for other in ({"x": {"y": None}}, {"x": {}}, {"x": {"y": {"a": 0}}}):
        tensor = torch.zeros(2)
        before = copy.deepcopy(other)
        with pytest.raises(
            DataError, match=rf"x\.y: expected a .*{type(value).__name__}.* to load"
        ):
            bcp.load(tmp_path / "c", {"t": tensor} | other)
        assert other == before
        assert not tensor.any(), "refused before anything is loaded"
    with bcp.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint.extra["x"]["y"]) == list(value)
