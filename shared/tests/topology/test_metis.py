from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.topology import metis

METHODS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
    )
    for name in ("pymetis", "dgl")
]


def graph(src, dst, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(src, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(src, minlength=num_nodes))])
    return indptr.astype(np.int64), np.asarray(dst, dtype=np.int64)[order]


def blocks(num_blocks: int, size: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense blocks with a few random edges between; each edge in one direction only."""
    rng = np.random.default_rng(0)
    num_nodes = num_blocks * size
    src = rng.integers(0, num_nodes, num_nodes * degree)
    dst = src // size * size + rng.integers(0, size, len(src))
    strays = rng.random(len(src)) < 0.02
    dst[strays] = rng.integers(0, num_nodes, strays.sum())
    return graph(src, dst, num_nodes)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_are_found(method):
    indptr, indices = blocks(4, 500, 10)
    parts = metis.partition(indptr, indices, 4, method=method)
    assert parts.dtype == np.int64
    assert np.bincount(parts, minlength=4).max() <= 1.05 * 500
    src = np.repeat(np.arange(len(parts)), np.diff(indptr))
    # Strays within one block are no cut: 2 % times three quarters.
    assert np.mean(parts[src] != parts[indices]) < 0.02


@pytest.mark.skipif(find_spec("pymetis") is None, reason="pymetis is not installed")
def test_seed_decides():
    src, dst = np.random.default_rng(1).integers(0, 300, (2, 900))
    indptr, indices = graph(src, dst, 300)
    first, again, other = (metis.partition(indptr, indices, 3, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.skipif(find_spec("pymetis") is None, reason="pymetis is not installed")
def test_weights_are_balanced_instead_of_nodes():
    src, dst = np.random.default_rng(1).integers(0, 400, (2, 4000))
    indptr, indices = graph(src, dst, 400)
    weights = np.where(np.arange(400) < 40, 20, 1)
    parts = metis.partition(indptr, indices, 2, weights=weights)
    loads = np.bincount(parts, weights=weights)
    assert loads.max() < 1.1 * loads.mean()


@given(st.integers(1, 30), st.integers(1, 12), st.data())
def test_small_graphs_of_any_kind(num_nodes, parts, data):
    nodes = st.integers(0, num_nodes - 1)
    edges = data.draw(st.lists(st.tuples(nodes, nodes), max_size=60))
    src, dst = (np.array([edge[end] for edge in edges], dtype=np.int64) for end in (0, 1))
    assignment = metis.partition(*graph(src, dst, num_nodes), parts)
    assert assignment.shape == (num_nodes,)
    sizes = np.bincount(assignment, minlength=parts)
    assert len(sizes) == parts
    assert (sizes > 0).sum() == min(num_nodes, parts)


def test_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(metis, "find_spec", lambda name: None)
    indptr, indices = blocks(2, 5, 2)
    with pytest.raises(ConfigError, match=r"pip install pymetis or pip install 'dgl==1.1.3'"):
        metis.partition(indptr, indices, 2)
    with pytest.raises(ConfigError, match=r"needs dgl, not installed: pip install 'dgl==1.1.3'"):
        metis.partition(indptr, indices, 2, method="dgl")


def test_auto_takes_what_is_there(monkeypatch):
    chosen = []
    monkeypatch.setattr(metis, "find_spec", lambda name: name == "dgl" or None)
    monkeypatch.setattr(
        metis, "by_dgl", lambda graph, parts: chosen.append(parts) or np.zeros(10, dtype=np.int64)
    )
    parts = metis.partition(*blocks(2, 5, 2), 2)
    assert chosen == [2]
    assert np.bincount(parts).tolist() == [9, 1], "an empty part is filled"
    with pytest.raises(ConfigError, match="no node weights; pip install pymetis"):
        metis.partition(*blocks(2, 5, 2), 2, weights=np.ones(10, dtype=np.int64))


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2], [0], "rise from 0 to the number of edges, 1"),
        ([0, 2, 1, 2], [0, 0], "rise from 0"),
        ([0], [], "at least one node"),
        ([0, 1], [1], r"neighbours must be nodes 0\.\.0, got 1\.\.1"),
        ([0, 1], [-1], r"nodes 0\.\.0, got -1\.\.-1"),
    ],
)
def test_arrays_that_are_no_graph(indptr, indices, message):
    with pytest.raises(DataError, match=message):
        metis.partition(np.array(indptr), np.array(indices, dtype=np.int64), 2)


def test_bad_settings():
    indptr, indices = blocks(2, 5, 2)
    with pytest.raises(ConfigError, match="parts must be at least 1, got 0"):
        metis.partition(indptr, indices, 0)
    with pytest.raises(ConfigError, match="'auto', 'dgl' or 'pymetis', got 'scotch'"):
        metis.choose_library("scotch")
    with pytest.raises(DataError, match="10 positive integers"):
        metis.partition(indptr, indices, 2, weights=np.zeros(10, dtype=np.int64))
