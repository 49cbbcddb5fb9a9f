"""Graphs from tensors, arrays and lists of any type: one form inside, and every refusal."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shared.errors
from heta.graph.hetero_graph import HeteroGraph

DataError = shared.errors.DataError
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def papers(**changes):
    fields = {
        "num_nodes": {"paper": 4, "author": 3},
        "edges": {WRITES: ([2, 0, 1, 0], [0, 0, 3, 0]), CITES: ([0, 1], [1, 1])},
        "feat": {"paper": torch.arange(8.0).view(4, 2)},
        "target": "paper",
        "label": [0, 2, -1, 1],
        "masks": {"train": torch.tensor([True, False, True, False])},
    }
    return HeteroGraph(**(fields | changes))


def test_reads_lists_and_derives():
    graph = papers()
    assert graph.schema.num_edges == {WRITES: 4, CITES: 2}
    assert graph.schema.feat_dim == {"paper": 2}
    assert graph.num_classes == 3
    assert graph.num_unlabelled == 1
    assert graph.seeds("train").tolist() == [0]
    assert repr(graph) == f"HeteroGraph(schema={graph.schema!r})"
    assert papers(label=None).num_classes == 0
    assert papers(label=None).num_unlabelled == 4


@given(st.data())
def test_csr_has_each_edge_in_order_of_destination_then_source(data):
    num_src, num_dst = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = data.draw(st.lists(edge, max_size=12))
    relation = ("a", "to", "b")
    graph = HeteroGraph(
        {"a": num_src, "b": num_dst},
        {relation: tuple(zip(*edges, strict=True)) or ([], [])},
        target="b",
    )
    csr = graph.csr(relation)
    rows = torch.repeat_interleave(torch.arange(csr.num_rows), csr.indptr.diff())
    pairs = list(zip(csr.indices.tolist(), rows.tolist(), strict=True))
    assert pairs == sorted(edges, key=lambda pair: pair[::-1])
    assert (csr.num_rows, csr.num_cols) == (num_dst, num_src)
    assert graph.csr(relation) is csr


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_ids_of_any_whole_type_are_equal(dtype):
    ids = {WRITES: np.array([[2, 0, 1, 0], [0, 0, 3, 0]], dtype), CITES: ([0, 1], [1, 1])}
    graph = papers(edges=ids)
    assert graph.edges[WRITES][0].dtype == torch.int64
    assert graph.fingerprint() == papers().fingerprint()


def test_empty_edge_lists_of_any_type_are_none():
    for empty in ([], np.array([]), torch.tensor([])):
        graph = papers(edges={WRITES: (empty, empty), CITES: ([0], [1])})
        assert graph.csr(WRITES).nnz == 0


def test_non_contiguous_ids_are_read_as_they_are():
    pairs = torch.tensor([[2, 0], [0, 0], [1, 3], [0, 0]])
    graph = papers(edges={WRITES: pairs.t(), CITES: ([0, 1], [1, 1])})
    assert graph.fingerprint() == papers().fingerprint()


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (([0.0], [0]), "source ids: expected whole numbers .* got torch.float32"),
        (([0], [True]), "destination ids: expected whole numbers .* got torch.bool"),
        ((np.array([0], np.uint64), [0]), "of at most 32 bits, got torch.uint64"),
        (([0, 1], [0]), "as many sources as destinations, got 2 and 1"),
        (([0, 3], [0, 0]), "author -writes-> paper: expected source ids from 0 to 2, .* got 3 at edge 1"),
        (([0, 0], [0, -1]), "expected destination ids from 0 to 3, .*'paper', got -1 at edge 1"),
        (([[0]], [[0]]), r"source ids: .* got torch.int64 \[1, 1\]"),
        (([0], [0], [0.5]), "got 3 entries; edge weights and attributes are not read"),
        (torch.zeros(4, dtype=torch.int64), r"\(source ids, destination ids\), got shape \[4\]"),
        (None, r"\(source ids, destination ids\), got None"),
        ((0, 0), "expected lists of ids, got 0"),
        ((["x"], [0]), "source ids: expected a tensor or array of numbers"),
    ],
)  # fmt: skip
def test_refuses_edges(ends, message):
    with pytest.raises(DataError, match=message):
        papers(edges={WRITES: ends, CITES: ([], [])})


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64"])
def test_features_become_float32(dtype):
    rows = np.array([[0, 1], [1, 0], [1, 1], [0, 0]], dtype)
    feat = papers(feat={"paper": rows}).feat["paper"]
    assert feat.dtype == torch.float32
    assert feat.tolist() == rows.astype(float).tolist()


@pytest.mark.parametrize(
    ("feat", "message"),
    [
        (torch.zeros(3, 2), "feat of 'paper': expected a row for each of its 4 nodes, got 3"),
        (torch.zeros(4), r"expected \[num_nodes, dim\] with dim of at least 1, got \[4\]"),
        (torch.zeros(4, 0), r"dim of at least 1, got \[4, 0\]"),
        (torch.zeros(4, 2, dtype=torch.complex64), "expected real numbers"),
        (torch.zeros(4, 2, requires_grad=True), "leave it out for learnable rows, or detach it"),
        (torch.zeros(4, 2).to_sparse(), "expected a dense tensor"),
        (torch.full((4, 2), 2**24 + 1), "whole numbers up to 2.24, .* got 16777217"),
        (torch.full((4, 2), -(2**40)), "got -1099511627776"),
        (np.array([[0, 0], [0, np.nan], [0, 0], [0, 0]]), "row 1, column 1: .* got nan"),
        (np.array([[0, 0], [0, 0], [0, 0], [-np.inf, 0]]), "row 3, column 0: .* got -inf"),
        (np.full((4, 2), 1e39), "row 0, column 0: expected a finite float32, got 1e[+]39"),
    ],
)
def test_refuses_features(feat, message):
    with pytest.raises(DataError, match=message):
        papers(feat={"paper": feat})


def test_refuses_features_of_an_unknown_type():
    with pytest.raises(DataError, match="feat of type 'shelf': expected one of the types"):
        papers(feat={"shelf": torch.zeros(1, 1)})


@pytest.mark.parametrize(
    "label",
    [
        [0, 2, -1, 1],
        np.array([0, 2, np.nan, 1]),
        torch.tensor([[0], [2], [-1], [1]], dtype=torch.int16),
        torch.tensor([0, 2, float("nan"), 1], dtype=torch.bfloat16),
    ],
)
def test_missing_labels_are_masked_and_counted(label):
    graph = papers(label=label, masks={"train": [True] * 4})
    assert graph.label.tolist() == [0, 2, -1, 1]
    assert graph.label.dtype == torch.int64
    assert graph.num_unlabelled == 1
    assert graph.seeds("train").tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([0, 1], r"for each of the 4 nodes of 'paper', got shape \[2\]"),
        (torch.zeros(4, 3), r"got shape \[4, 3\]"),
        ([0, 1, -100, 0], "label of node 2 of 'paper': .* got -100"),
        ([0, 1, 1.5, 0], "label of node 2 of 'paper': .* got 1.5"),
        ([0, 1, float("inf"), 0], "label of node 2 of 'paper': .* got inf"),
        (["a", "b", "c", "d"], "label: expected a tensor or array of numbers"),
    ],
)
def test_refuses_labels(label, message):
    with pytest.raises(DataError, match=message):
        papers(label=label)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([0, 1], r"mask 'train': expected a bool for each of the 4 nodes of 'paper', got .* \[2\]"),
        ([0, 1, 2, 3], r"of ids make one by mask\[ids\] = True"),
        (torch.zeros(4), "got torch.float32"),
    ],
)
def test_refuses_masks(mask, message):
    with pytest.raises(DataError, match=message):
        papers(masks={"train": mask})


def test_masks_of_0_and_1_are_bools():
    assert papers(masks={"val": np.array([0, 1, 1, 0], np.uint8)}).seeds("val").tolist() == [1]


def test_seeds_need_labels_and_a_known_split():
    with pytest.raises(DataError, match=r"split 'val': .* got masks \['train'\]"):
        papers().seeds("val")
    with pytest.raises(DataError, match=r"split 'train': .* got no labels"):
        papers(label=None).seeds("train")


def test_refuses_an_unknown_relation_and_wrong_node_ids():
    with pytest.raises(
        DataError, match="expected one of author -writes-> paper, paper -cites-> paper"
    ):
        papers().csr(("author", "reads", "paper"))
    with pytest.raises(DataError, match="node_ids of 'author': expected 3, got 2"):
        papers(node_ids={"author": ["x", "y"]})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": {"paper": 4, "author": 4}},
        {"edges": {CITES: ([0, 1], [1, 1]), WRITES: ([2, 0, 1, 0], [0, 0, 3, 0])}},
        {"edges": {WRITES: ([2, 0, 1, 0], [0, 0, 3, 1]), CITES: ([0, 1], [1, 1])}},
        {"feat": {"paper": torch.arange(8.0).view(4, 2) + 1}},
        {"feat": {"paper": torch.zeros(4, 2), "author": torch.zeros(3, 1)}},
        {"label": [0, 2, -1, 0]},
        {"label": None},
        {"masks": {"train": [True] * 4}},
        {"masks": {"val": torch.tensor([True, False, True, False])}},
    ],
)
def test_fingerprints_differ_by_all_that_is_read(changes):
    assert papers(**changes).fingerprint() != papers().fingerprint()
    assert papers().fingerprint() == papers().fingerprint()


def test_notices_that_a_tensor_changed():
    feat = torch.arange(8.0).view(4, 2)
    graph = papers(feat={"paper": feat})
    graph.check_unchanged()
    feat[3, 1] = 0
    with pytest.raises(
        DataError, match=r"its tensors were changed .* make a new HeteroGraph, and plan"
    ):
        graph.check_unchanged()
