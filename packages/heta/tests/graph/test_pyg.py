"""Conversion from PyG: every form of edges, and every refusal's sentence."""

import sys

import pytest
import torch

import shared.errors
from heta.graph.pyg import from_pyg, to_pyg

pyg = pytest.importorskip("torch_geometric.data")
DataError = shared.errors.DataError
WRITES, BY = ("author", "writes", "paper"), ("paper", "by", "author")


def papers():
    data = pyg.HeteroData()
    data["paper"].x = torch.arange(8.0).view(4, 2)
    data["paper"].y = torch.tensor([0, 1, -1, 1])
    data["paper"].train_mask = torch.tensor([True, False, True, False])
    data["paper"].test_mask = torch.tensor([False, True, False, False])
    data["author"].num_nodes = 3
    data[WRITES].edge_index = torch.tensor([[2, 0, 1], [0, 3, 3]])
    data[BY].edge_index = torch.tensor([[0, 3, 3], [2, 0, 1]])
    return data


def test_reads_types_relations_labels_and_masks():
    data = papers()
    graph = from_pyg(data)
    assert graph.target == "paper"
    assert graph.schema.relations == (WRITES, BY)
    assert graph.schema.learnable == ("author",)
    assert torch.equal(graph.feat["paper"], data["paper"].x)
    assert graph.label.tolist() == [0, 1, -1, 1]
    assert sorted(graph.masks) == ["test", "train"]
    assert [ids.tolist() for ids in graph.edges[WRITES]] == [[2, 0, 1], [0, 3, 3]]
    assert sorted(data.node_types) == ["author", "paper"]


def test_goes_to_pyg_and_back():
    graph = from_pyg(papers())
    assert from_pyg(to_pyg(graph)).fingerprint() == graph.fingerprint()


def test_reads_other_labels_and_targets():
    data = papers()
    data["author"].rank = torch.tensor([0, 1, 1])
    with pytest.raises(DataError, match=r"data\['paper'\]: .* got also y;"):
        from_pyg(data, target="author", label="rank")
    graph = from_pyg(data, target="author", label="rank", ignore=["y"])
    assert graph.label.tolist() == [0, 1, 1]
    assert graph.masks == {}
    assert "paper" in graph.feat


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_reads_transposed_matrices(layout):
    import torch_geometric.transforms

    expected = from_pyg(papers())
    data = torch_geometric.transforms.ToSparseTensor(layout=layout)(papers())
    assert "adj_t" in data[WRITES]
    graph = from_pyg(data)
    for relation in (WRITES, BY):
        assert torch.equal(graph.csr(relation).indices, expected.csr(relation).indices)
        assert torch.equal(graph.csr(relation).indptr, expected.csr(relation).indptr)


def test_reads_an_edge_index_object():
    import torch_geometric

    data = papers()
    ends = data[WRITES].edge_index
    data[WRITES].edge_index = torch_geometric.EdgeIndex(ends, sparse_size=(3, 4))
    assert from_pyg(data).fingerprint() == from_pyg(papers()).fingerprint()


def change(data, kind, **attributes):
    for name, value in attributes.items():
        data[kind][name] = value


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (WRITES, "edge_attr", torch.ones(3, 2)),
        (WRITES, "edge_weight", torch.ones(3)),
        (WRITES, "time", torch.arange(3)),
        (BY, "edge_label_index", torch.zeros(2, 1)),
        ("paper", "year", torch.arange(4)),
        ("author", "pos", torch.ones(3, 2)),
    ],
)
def test_refuses_what_is_not_read_by_name(kind, name, value):
    data = papers()
    data[kind][name] = value
    with pytest.raises(
        DataError, match=rf"got also {name}; .* leave it out by ignore=\('{name}',\)"
    ):
        from_pyg(data)
    assert from_pyg(data, ignore=[name]).fingerprint() == from_pyg(papers()).fingerprint()


def test_x_that_is_ignored_becomes_learnable():
    assert from_pyg(papers(), ignore=["x"]).schema.learnable == ("paper", "author")


def test_refuses_weights_in_a_transposed_matrix():
    data = papers()
    del data[WRITES].edge_index
    ends = torch.tensor([[0, 3, 3], [2, 0, 1]])
    weights = torch.tensor([1.0, 0.5, 1.0])
    data[WRITES].adj_t = torch.sparse_coo_tensor(ends, weights, (4, 3)).coalesce()
    with pytest.raises(DataError, match=r"adj_t: expected values of 1, .* got 0.5"):
        from_pyg(data)
    assert from_pyg(data, ignore=["adj_t"]).schema.num_edges[WRITES] == 3


def no_count(data):
    del data["author"].num_nodes


def no_store(data):
    del data["author"]
    data[WRITES].edge_index = torch.zeros(2, 1, dtype=torch.int64)


def no_way_in(data):
    del data[WRITES]


@pytest.mark.parametrize(
    ("break_data", "message"),
    [
        (lambda data: change(data, "author", y=torch.zeros(3)), "one type with 'y', .* name the target"),
        (lambda data: data["paper"].pop("y"), r"one type with 'y', got \[\] of"),
        (no_count, r"data\['author'\]: expected num_nodes or x, .* set data\['author'\].num_nodes"),
        (no_store, r"set data\['author'\].num_nodes"),
        (no_way_in, "target 'paper': expected a relation into it, .* add reversed relations"),
        (lambda data: data[WRITES].pop("edge_index"), r"expected edge_index or adj_t, got \[\]"),
        (
            lambda data: change(data, WRITES, edge_index=torch.zeros(3, 2, dtype=torch.int64)),
            r"edge_index: expected \[2, num_edges\], got \[3, 2\]; edge_index.t\(\) turns",
        ),
        (lambda data: change(data, WRITES, adj_t=torch.eye(3).to_sparse()), "expected edge_index or adj_t"),
        (
            lambda data: change(data, WRITES, edge_index=torch.tensor([[3], [0]])),
            "author -writes-> paper: expected source ids from 0 to 2, .* got 3",
        ),
        (lambda data: change(data, "paper", x=torch.full((4, 1), torch.nan)), "row 0, column 0"),
    ],
)  # fmt: skip
def test_refuses(break_data, message):
    data = papers()
    break_data(data)
    with pytest.raises(DataError, match=message):
        from_pyg(data)


def test_refuses_other_objects():
    data = pyg.Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]))
    with pytest.raises(DataError, match=r"expected a HeteroData, got a Data, .*to_heterogeneous"):
        from_pyg(data)
    with pytest.raises(DataError, match="expected a HeteroData, got dict"):
        from_pyg({})
    with pytest.raises(DataError, match=r"target: expected one of .* got 'book'"):
        from_pyg(papers(), target="book")
    with pytest.raises(
        DataError, match=r"ignore: expected a list of names, got 'time'; give \('time',\)"
    ):
        from_pyg(papers(), ignore="time")


def test_names_the_extra_where_pyg_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(DataError, match=r"pip install 'meshyard-heta\[pyg\]'"):
        from_pyg({})
