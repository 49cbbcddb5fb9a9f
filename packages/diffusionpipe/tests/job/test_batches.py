import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.job.batches import count_rows, flatten, take_rows, unflatten
from shared.errors import ConfigError, DataError


def test_rows_of_tensors_arrays_and_lists_are_cut():
    batch = {"x": torch.arange(6).reshape(3, 2), "y": np.arange(3), "z": ["a", "b", "c"]}
    assert count_rows(batch) == 3
    rows = take_rows(batch, range(1, 3))
    assert rows["x"].tolist() == [[2, 3], [4, 5]]
    assert rows["y"].tolist() == [1, 2]
    assert rows["z"] == ["b", "c"]


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({}, "expected a batch as a dictionary .*, got an empty one"),
        (torch.zeros(2), "got Tensor"),
        ({"x": torch.zeros(2), "y": [1]}, r"as many rows in every entry of a batch, got \{'x': 2"),
        ({"x": torch.tensor(1.0)}, r"batch\['x'\]: expected a tensor, an array or a list"),
        ({"x": "text"}, r"batch\['x'\]: .* got str"),
        ({"x": 1.0}, r"batch\['x'\]: .* got float"),
    ],
)
@pytest.mark.unchecked
def test_batches_without_rows_are_refused(batch, match):
    with pytest.raises(DataError, match=match):
        count_rows(batch)


_TREES = st.recursive(
    st.integers(0, 9).map(lambda n: torch.tensor([n])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["p", "q"]), _TREES, min_size=1))
def test_nested_values_come_back(tree):
    flat = {k: t for name, value in tree.items() for k, t in flatten(name, value).items()}
    assert all(isinstance(tensor, torch.Tensor) for tensor in flat.values())
    assert unflatten(flat) == tree


def test_nothing_is_left_out_and_numbers_are_refused():
    one = torch.zeros(1)
    assert flatten("x", {"a": None, "b": [one]}) == {"x.b.0": one}
    with pytest.raises(
        ConfigError, match=r"x\.b: expected a tensor, or a dictionary, .* got float"
    ):
        flatten("x", {"b": 1.0})
