import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import memo
from shared.errors import ConfigError

sizes = st.floats(0, 1e12)
tensors = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100)), min_size=1, max_size=8)


def solve_lp(worth, bytes_rows, rooms):
    """The largest worth of fractions in [0, 1] whose bytes fit, by HiGHS."""
    found = linprog(-np.array(worth), A_ub=np.array(bytes_rows), b_ub=rooms, bounds=(0, 1))
    return None if found.status == 2 else -found.fun


@given(sizes, st.floats(1, 1e12), sizes, sizes, st.integers(3, 100))
def test_alpha_is_the_linear_programs(whole, row, link, store, num_layers):
    found = memo.alpha(
        whole_bytes=whole, row_bytes=row, link_bytes=link, store_bytes=store, num_layers=num_layers
    )
    n = num_layers - 2
    best = solve_lp([1.0], [[1.0], [1.0]], [(link - whole) / row, (store / n - whole) / row])
    assert found == pytest.approx(best or 0.0, rel=1e-6, abs=1e-6)
    # And the limits hold, but for rounding, unless not even the whole tensors fit.
    if best is not None:
        assert whole + found * row <= min(link, store / n) * (1 + 1e-9) + 1e-6


def test_alpha_binds_on_the_link_or_on_the_store():
    layer = {"whole_bytes": 100, "row_bytes": 700, "num_layers": 12}
    assert memo.alpha(**layer, link_bytes=450, store_bytes=None) == 0.5
    assert memo.alpha(**layer, link_bytes=None, store_bytes=2750) == 0.25
    assert memo.alpha(**layer, link_bytes=450, store_bytes=2750) == 0.25
    assert memo.alpha(**layer, link_bytes=None, store_bytes=None) == 1
    assert memo.alpha(**layer, link_bytes=333, store_bytes=None) == 233 / 700  # not rounded


@pytest.mark.parametrize("num_layers", [1, 2])
def test_last_two_layers_need_no_store(num_layers):
    layer = {"whole_bytes": 100, "row_bytes": 700, "link_bytes": 0, "store_bytes": 0}
    assert memo.alpha(**layer, num_layers=num_layers) == 1
    assert memo.alpha(**layer, num_layers=num_layers, is_clipped=False) == math.inf
    assert memo.alpha(**layer, num_layers=3) == 0


def test_a_value_below_zero_can_be_told_from_zero():
    layer = {"whole_bytes": 100, "row_bytes": 700, "store_bytes": None, "num_layers": 12}
    assert memo.alpha(**layer, link_bytes=30, is_clipped=False) * 700 == pytest.approx(-70)
    assert memo.alpha(**layer, link_bytes=30) == 0
    assert memo.alpha(**layer, link_bytes=100, is_clipped=False) == 0
    assert memo.alpha(**layer, link_bytes=1500, is_clipped=False) == 2
    assert memo.alpha(**layer, link_bytes=None, is_clipped=False) == math.inf


def test_without_rows_all_or_nothing_fits():
    layer = {"whole_bytes": 100, "row_bytes": 0, "store_bytes": None, "num_layers": 12}
    assert memo.alpha(**layer, link_bytes=100) == 1
    assert memo.alpha(**layer, link_bytes=99) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole_bytes", -1), ("row_bytes", -1), ("link_bytes", -1), ("store_bytes", -1),
        ("whole_bytes", math.nan), ("store_bytes", math.nan), ("row_bytes", math.inf), ("num_layers", 0),
    ],
)  # fmt: skip
def test_bad_sizes_are_refused_by_name(name, value):
    layer = {"whole_bytes": 1, "row_bytes": 1, "link_bytes": 1, "store_bytes": 1, "num_layers": 4}
    with pytest.raises(ConfigError, match=f"alpha.{name}: expected"):
        memo.alpha(**{**layer, name: value})


@given(tensors, st.integers(0, 5000))
def test_alphas_are_the_linear_programs(tensors, room):
    items = {str(number): tensor for number, tensor in enumerate(tensors)}
    found = memo.alphas(items, room)
    assert list(found) == list(items)
    assert all(0 <= value <= 1 for value in found.values())
    used = sum(items[name][0] * value for name, value in found.items())
    assert used <= room * (1 + 1e-12)
    saved = sum(items[name][1] * value for name, value in found.items())
    best = solve_lp([s for _, s in tensors], [[b for b, _ in tensors]], [room])
    assert saved == pytest.approx(best, rel=1e-6, abs=1e-6)
    # A fractional knapsack splits one tensor at most, and leaves no room that could be filled.
    assert sum(0 < value < 1 for value in found.values()) <= 1
    assert used == pytest.approx(min(room, sum(b for b, _ in tensors)))


def test_most_seconds_a_byte_come_first():
    items = {"cheap": (100, 1.0), "dear": (50, 2.0), "free": (0, 0.0), "useless": (10, 0.0)}
    assert memo.alphas(items, 75) == {"cheap": 0.25, "dear": 1, "free": 1, "useless": 0}
    assert memo.alphas(items, 0) == {"cheap": 0, "dear": 0, "free": 1, "useless": 0}


def test_equals_fill_the_room_in_the_order_given():
    assert memo.alphas({"b": (4, 1.0), "a": (4, 1.0)}, 6) == {"b": 1, "a": 0.5}
    assert memo.alphas({"a": (4, 1.0), "b": (4, 1.0)}, 6) == {"a": 1, "b": 0.5}


@pytest.mark.parametrize("room", [None, math.inf])
def test_without_limit_all_is_swapped(room):
    assert memo.alphas({"a": (4, 1.0), "b": (8, 0.0)}, room) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    "bad", [(-1, 1.0), (1, -1.0), (math.nan, 1.0), (1, math.nan), (1, math.inf)]
)
def test_bad_tensors_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=r"alphas\['q'\]: expected"):
        memo.alphas({"q": bad}, 1)


@pytest.mark.parametrize("room", [-1, math.nan])
def test_bad_rooms_are_refused(room):
    with pytest.raises(ConfigError, match=r"alphas\.room_bytes: expected"):
        memo.alphas({"q": (1, 1.0)}, room)


@pytest.mark.unchecked
def test_texts_and_single_numbers_are_no_sizes():
    with pytest.raises(
        ConfigError,
        match=r"alpha\.whole_bytes: expected a finite number of bytes from 0, got '1GiB'",
    ):
        memo.alpha(whole_bytes="1GiB", row_bytes=1, link_bytes=1, store_bytes=1, num_layers=4)
    with pytest.raises(
        ConfigError, match=r"alphas\['q'\]: expected a pair of bytes and seconds, got 3; give both"
    ):
        memo.alphas({"q": 3})
    with pytest.raises(
        ConfigError, match=r"alphas\['q'\]: expected a finite number of bytes from 0, got '3MiB'"
    ):
        memo.alphas({"q": ("3MiB", 1.0)})
