"""Conversion from DGL, and every refusal's sentence."""

import sys

import pytest
import torch

import shared.errors
from heta.graph.dgl import from_dgl

dgl = pytest.importorskip("dgl")
DataError = shared.errors.DataError
WRITES, READS = ("author", "writes", "paper"), ("author", "reads", "paper")


def papers(dtype=torch.int64):
    edges = {WRITES: ([2, 0, 1], [0, 3, 3]), READS: ([0], [1])}
    ends = {
        relation: tuple(torch.tensor(ids, dtype=dtype) for ids in pair)
        for relation, pair in edges.items()
    }
    g = dgl.heterograph(ends, {"paper": 4, "author": 3})
    g.nodes["paper"].data["feat"] = torch.arange(8.0).view(4, 2)
    g.nodes["paper"].data["label"] = torch.tensor([0, 1, -1, 1])
    g.nodes["paper"].data["train_mask"] = torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    return g


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reads_types_relations_labels_and_masks(dtype):
    graph = from_dgl(papers(dtype))
    assert graph.target == "paper"
    assert graph.num_nodes == {"author": 3, "paper": 4}
    assert set(graph.schema.relations) == {WRITES, READS}
    assert graph.schema.learnable == ("author",)
    assert graph.feat["paper"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert graph.label.tolist() == [0, 1, -1, 1]
    assert graph.masks["train"].tolist() == [True, False, True, False]
    assert [ids.tolist() for ids in graph.edges[WRITES]] == [[2, 0, 1], [0, 3, 3]]


def test_reads_a_subgraph_whose_original_ids_are_left_out():
    g = dgl.node_subgraph(papers(), {"paper": [0, 3], "author": [0, 1, 2]})
    assert dgl.NID in g.nodes["paper"].data
    assert dgl.EID in g.edges["writes"].data
    graph = from_dgl(g)
    assert graph.schema.num_edges[WRITES] == 3
    assert graph.label.tolist() == [0, 1]


def test_reads_other_names():
    g = papers()
    g.nodes["author"].data["h"] = torch.ones(3, 1)
    g.nodes["author"].data["rank"] = torch.tensor([0, 1, 1])
    g.nodes["paper"].data.pop("feat")
    g.nodes["paper"].data.pop("label")
    with pytest.raises(DataError, match=r"relation into it, got relations into \['paper'\]"):
        from_dgl(g, feat="h", label="rank")


@pytest.mark.parametrize(("name", "where"), [("w", "edges"), ("time", "edges"), ("year", "nodes")])
def test_refuses_what_is_not_read_by_name(name, where):
    g = papers()
    if where == "edges":
        g.edges["writes"].data[name] = torch.ones(3)
    else:
        g.nodes["author"].data[name] = torch.ones(3)
    with pytest.raises(
        DataError, match=rf"g.{where}\[.*got also {name}; .* by ignore=\('{name}',\)"
    ):
        from_dgl(g)
    assert from_dgl(g, ignore=[name]).fingerprint() == from_dgl(papers()).fingerprint()


def test_features_that_are_ignored_become_learnable():
    assert from_dgl(papers(), ignore=["feat"]).schema.learnable == ("author", "paper")


def test_refuses_other_objects():
    with pytest.raises(DataError, match=r"got one of each; make it by dgl.heterograph"):
        from_dgl(dgl.graph(([0, 1], [1, 2])))
    with pytest.raises(DataError, match="expected a DGLGraph, got a block"):
        from_dgl(dgl.create_block(([0], [0])))
    with pytest.raises(DataError, match="expected a DGLGraph, got dict"):
        from_dgl({})
    with pytest.raises(DataError, match=r"one type with 'y', got \[\] of"):
        from_dgl(papers(), label="y")


def test_names_the_extra_where_dgl_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(DataError, match=r"pip install 'meshyard-heta\[dgl\]'"):
        from_dgl({})
