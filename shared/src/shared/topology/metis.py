"""METIS graph partitioning behind one function, by pymetis or by DGL.

METIS ("A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", Karypis and
Kumar 1998) balances nodes and minimises cut edges. Both libraries are optional. Beyond what they
support, the graph may be directed, with duplicate edges and self loops, and no part is empty if
there are at least as many nodes as parts.
"""

from __future__ import annotations

import contextlib
import io
import logging
from importlib.util import find_spec
from typing import Literal

import numpy as np
from jaxtyping import Integer
from scipy.sparse import csr_array

from shared.errors import ConfigError, DataError

__all__ = ["partition"]

_log = logging.getLogger(__name__)
_INSTALL = {"pymetis": "pip install pymetis", "dgl": "pip install 'dgl==1.1.3'"}


def partition(
    indptr: Integer[np.ndarray, " rows_plus_one"],
    indices: Integer[np.ndarray, " nnz"],
    parts: int,
    *,
    method: Literal["auto", "dgl", "pymetis"] = "auto",
    seed: int = 0,
    weights: Integer[np.ndarray, " rows"] | None = None,
) -> Integer[np.ndarray, " rows"]:
    """Assign each node of a graph to a part, balanced and with few edges cut.

    Args:
        indptr: integer array [num_nodes + 1], start of each node's neighbours in `indices`.
        indices: integer array [num_edges], the neighbours. Directions are ignored.
        parts: number of parts.
        method: library to use; "auto" takes pymetis if it is installed, else DGL.
        seed: seed of METIS's random choices; has no effect with DGL, which does not pass it on.
        weights: positive integers [num_nodes]; parts are balanced by their sums instead of by
            numbers of nodes; pymetis only.

    Returns:
        int64 array [num_nodes] of parts 0..parts-1. Every part has a node if num_nodes >= parts.

    Raises:
        ConfigError: if parts < 1, the method is unknown or not installed, or DGL is asked for
            weights.
        DataError: if the arrays do not describe a graph.
    """
    num_nodes = len(indptr) - 1
    if parts < 1:
        raise ConfigError(f"parts must be at least 1, got {parts}")
    _check_graph(indptr, indices)
    if weights is not None and (len(weights) != num_nodes or (weights <= 0).any()):
        raise DataError(f"weights must be {num_nodes} positive integers, got {weights!r}")
    library = choose_library(method)
    if library == "dgl" and weights is not None:
        raise ConfigError(f"DGL's METIS takes no node weights; {_INSTALL['pymetis']}")
    if parts == 1 or num_nodes <= parts:
        return np.arange(num_nodes, dtype=np.int64) % parts
    graph = _undirected(indptr, indices)
    if graph.nnz == 0:
        return np.arange(num_nodes, dtype=np.int64) * parts // num_nodes
    if library == "pymetis":
        assignment = _by_pymetis(graph, parts, seed, weights)
    else:
        assignment = by_dgl(graph, parts)
    _fill_empty_parts(assignment, parts)
    return assignment


def choose_library(method: str) -> str:
    """The library that a method names, or for "auto" the first that is installed.

    Raises:
        ConfigError: the method is unknown, or its library is not installed.
    """
    if method not in ("auto", *_INSTALL):
        raise ConfigError(f"method must be 'auto', 'dgl' or 'pymetis', got {method!r}")
    # pymetis first: it imports in milliseconds and takes the seed.
    wanted = list(_INSTALL) if method == "auto" else [method]
    for name in wanted:
        if find_spec(name) is not None:
            return name
    commands = " or ".join(_INSTALL[name] for name in wanted)
    raise ConfigError(f"METIS partitioning needs {' or '.join(wanted)}, not installed: {commands}")


def _check_graph(indptr: np.ndarray, indices: np.ndarray) -> None:
    num_nodes = len(indptr) - 1
    if num_nodes < 1 or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise DataError(
            f"indptr must rise from 0 to the number of edges, {len(indices)}, over at least one "
            f"node; got {num_nodes + 1} entries from {indptr[:1]} to {indptr[-1:]}"
        )
    if len(indices) and not 0 <= indices.min() <= indices.max() < num_nodes:
        raise DataError(
            f"neighbours must be nodes 0..{num_nodes - 1}, got {indices.min()}..{indices.max()}"
        )


def _undirected(indptr: np.ndarray, indices: np.ndarray) -> csr_array:
    """Both directions of each edge once, no self loops: the only form METIS is correct for."""
    num_nodes = len(indptr) - 1
    ones = np.ones(len(indices), dtype=bool)
    graph = csr_array((ones, indices, indptr), shape=(num_nodes, num_nodes))
    graph = csr_array(graph + graph.T)
    graph.setdiag(False)
    graph.eliminate_zeros()
    return graph


def _by_pymetis(graph: csr_array, parts: int, seed: int, weights: np.ndarray | None) -> np.ndarray:
    import pymetis

    _, assignment = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(graph.indptr, graph.indices),
        vweights=None if weights is None else weights.tolist(),
        options=pymetis.Options(seed=seed),
        # Recursive bisection cuts a little less for few parts but takes twice the time.
        recursive=False,
    )
    return np.array(assignment, dtype=np.int64)


def by_dgl(graph: csr_array, parts: int) -> np.ndarray:
    import dgl
    import torch
    from dgl.partition import metis_partition_assignment

    indptr, indices = (torch.from_numpy(a.astype(np.int64)) for a in (graph.indptr, graph.indices))
    no_edge_ids = torch.empty(0, dtype=torch.int64)
    # DGL prints how long it took.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assignment = metis_partition_assignment(
            dgl.graph(("csr", (indptr, indices, no_edge_ids)), num_nodes=len(indptr) - 1), parts
        )
    _log.debug("%s", printed.getvalue())
    assert assignment is not None, "DGL's METIS returned no assignment"
    return assignment.numpy().astype(np.int64)


def _fill_empty_parts(assignment: np.ndarray, parts: int) -> None:
    """METIS may leave parts of small graphs empty: take a node from the largest part."""
    sizes = np.bincount(assignment, minlength=parts)
    for part in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        assignment[np.flatnonzero(assignment == largest)[-1]] = part
        sizes[largest] -= 1
        sizes[part] += 1
