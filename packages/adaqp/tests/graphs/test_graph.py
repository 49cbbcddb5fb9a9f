"""What a graph accepts, what it refuses and in which words, and where it can come from."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaqp.graphs.graph import Graph, from_dgl, from_edge_index, from_pyg
from shared.errors import DataError


def parts_of_graph(**changes):
    """Arguments of a small valid graph, some of them replaced."""
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 0] = mask[1, 1] = mask[2, 2] = True
    good = {
        "src": torch.tensor([0, 1, 2, 2]),
        "dst": torch.tensor([1, 2, 2, 0]),
        "num_nodes": 5,
        "feat": torch.arange(10.0).reshape(5, 2),
        "label": torch.arange(5) % 3,
        "train_mask": mask[0],
        "val_mask": mask[1],
        "test_mask": mask[2],
    }
    return good | changes


def test_a_graph_knows_its_sizes():
    graph = Graph(**parts_of_graph())
    assert (graph.num_edges, graph.num_feat, graph.num_classes) == (4, 2, 3)
    assert not graph.is_multilabel
    assert not graph.is_symmetric


def test_multilabel_counts_columns():
    graph = Graph(**parts_of_graph(label=torch.zeros(5, 7)))
    assert graph.is_multilabel
    assert graph.num_classes == 7


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_symmetric_means_equal_to_its_reverse(edges):
    src, dst = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    graph = Graph(**parts_of_graph(src=src, dst=dst))
    assert graph.is_symmetric == (sorted(edges) == sorted((v, u) for u, v in edges))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_kept_and_fingerprinted(dtype):
    graph = from_edge_index(**parts_of_graph(feat=torch.ones(5, 2, dtype=dtype)))
    assert graph.feat.dtype == dtype
    assert len(graph.fingerprint()) == 32


def test_fingerprint_changes_with_every_part_and_with_nothing_else():
    base = from_edge_index(**parts_of_graph())
    assert base.fingerprint() == from_edge_index(**parts_of_graph()).fingerprint()
    good = parts_of_graph()
    changes = [
        {"src": torch.tensor([0, 1, 2, 1])},
        {"dst": torch.tensor([1, 2, 2, 1])},
        {"feat": good["feat"] + torch.eye(5, 2)},
        {"feat": good["feat"].double()},
        {"label": torch.zeros(5, dtype=torch.int64)},
        {"train_mask": good["val_mask"], "val_mask": good["train_mask"]},
        {"test_mask": torch.tensor([0, 0, 0, 1, 0], dtype=torch.bool)},
    ]
    prints = {from_edge_index(**parts_of_graph(**change)).fingerprint() for change in changes}
    assert len(prints | {base.fingerprint()}) == len(changes) + 1


def test_conversion_from_numpy_lists_and_small_integers():
    graph = from_edge_index(
        np.array([0, 1], dtype=np.int32),
        [1, 0],
        2,
        np.ones((2, 3), dtype=np.float32),
        np.array([1, 0], dtype=np.uint8),
        [1, 0],
        [0, 1],
        np.zeros(2, dtype=np.uint8),
    )
    assert graph.src.dtype == graph.dst.dtype == graph.label.dtype == torch.int64
    assert graph.train_mask.tolist() == [True, False]
    assert from_edge_index([], [], 1, [[0.5]], [0], [1], [0], [0]).num_edges == 0


def test_one_row_taken_from_a_strided_tensor_has_the_fingerprint_of_its_values():
    pair = torch.tensor([[0, 0], [0, 0]])
    args = ([[0.5]], [0], [1], [0], [0])
    strided = from_edge_index(pair[:1, 0], pair[:1, 1], 1, *args)
    assert strided.fingerprint() == from_edge_index([0], [0], 1, *args).fingerprint()


def test_class_numbers_far_apart_are_refused():
    label = torch.tensor([0, 1_000_000, 2_000_000, 0, 0])
    with pytest.raises(
        DataError, match=r"label: expected class numbers .* 3 different ones up to 2000000"
    ):
        Graph(**parts_of_graph(label=label))
    assert Graph(**parts_of_graph(label=torch.tensor([0, 900, 3, -1, -1]))).num_classes == 901


def test_a_graph_without_edges_is_symmetric():
    assert from_edge_index([], [], 1, [[0.5]], [0], [1], [0], [0]).is_symmetric


def test_an_unlabelled_node_outside_the_masks_is_fine():
    label = torch.tensor([0, 1, 0, -1, -1])
    assert Graph(**parts_of_graph(label=label)).num_classes == 2


BAD = [
    ({"num_nodes": 0}, "num_nodes: expected at least 1, got 0"),
    (
        {"src": torch.tensor([0, 1, 2, 9])},
        r"edge 3 \(9 -> 0\): expected node ids from 0 to 4; correct the edge or num_nodes",
    ),
    ({"dst": torch.tensor([0, -1, 2, 3])}, r"edge 1 \(1 -> -1\): expected node ids from 0 to 4"),
    ({"dst": torch.tensor([0, 2**40, 2, 3])}, r"edge 1 \(1 -> 1099511627776\)"),
    ({"src": torch.tensor([0, 1])}, "src and dst: expected one entry an edge in both, got 2 and 4"),
    ({"src": torch.tensor([0.0, 1, 2, 2])}, "src: expected integers, got torch.float32"),
    ({"feat": torch.ones(4, 2)}, r"feat: expected 5 rows \(num_nodes\), got 4"),
    ({"feat": torch.ones(5)}, r"feat: expected floating point \[num_nodes, dim\]"),
    ({"feat": torch.ones(5, 2).long()}, r"feat: expected floating point .* got torch.int64"),
    (
        {"feat": torch.ones(5, 2).masked_fill(torch.arange(10).reshape(5, 2) == 7, torch.nan)},
        "feat of node 3, column 1: expected a finite number, got nan",
    ),
    ({"feat": torch.full((5, 2), -torch.inf)}, "feat of node 0, column 0: .* got -inf"),
    ({"label": torch.zeros(6, dtype=torch.int64)}, r"label: expected 5 rows \(num_nodes\), got 6"),
    ({"label": torch.zeros(5)}, "label: expected integers, got torch.float32"),
    ({"label": torch.zeros(5, 2, 2).long()}, "label: expected int64 .* got torch.int64 .5, 2, 2."),
    (
        {"label": torch.tensor([0, 0, -1, 0, 0])},
        "node 2 is in a mask, but its label is -1; give it a label or take it out of the masks",
    ),
    (
        {"label": torch.full((5, 2), torch.nan)},
        r"node 0 is in a mask, but its label is \[nan, nan\]",
    ),
    ({"val_mask": torch.zeros(3, dtype=torch.bool)}, r"val_mask: expected 5 rows .* got 3"),
    ({"val_mask": torch.zeros(5, 1, dtype=torch.bool)}, r"val_mask: expected bool \[num_nodes\]"),
    ({"train_mask": torch.tensor([0, 4])}, "train_mask: expected bool or 0/1 .* values up to 4"),
    (
        {"val_mask": torch.tensor([1, 1, 0, 0, 0])},
        r"node 0 is in train_mask and in val_mask \(one of 1 such nodes\)",
    ),
    ({"test_mask": torch.tensor([0, 1, 1, 0, 0])}, "node 1 is in val_mask and in test_mask"),
    ({"test_mask": torch.tensor([1, 0, 1, 0, 0])}, "node 0 is in train_mask and in test_mask"),
    ({"feat": "abc"}, "feat: expected an array of numbers"),
    ({"feat": [[1.0], [1.0, 2.0]]}, "feat: expected an array of numbers"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_named(changes, message):
    with pytest.raises(DataError, match=message):
        from_edge_index(**parts_of_graph(**changes))


def test_the_class_itself_asks_for_its_types():
    with pytest.raises(DataError, match=r"src: expected int64 .* adaqp.from_edge_index converts"):
        Graph(**parts_of_graph(src=torch.tensor([0, 1, 2, 2], dtype=torch.int32)))
    with pytest.raises(DataError, match=r"val_mask: expected bool .* adaqp.from_edge_index"):
        Graph(**parts_of_graph(val_mask=torch.zeros(5, dtype=torch.uint8)))


def same(one, other):
    return one.fingerprint() == other.fingerprint()


def test_from_dgl_takes_edges_in_order_and_names_of_its_own():
    dgl = pytest.importorskip("dgl")
    good = parts_of_graph()
    graph = dgl.graph((good["src"], good["dst"]), num_nodes=5)
    for name in ("feat", "train_mask", "val_mask", "test_mask"):
        graph.ndata[name] = good[name]
    graph.ndata["y"] = good["label"]
    assert same(from_dgl(graph, label="y"), from_edge_index(**good))
    with pytest.raises(DataError, match=r"graph.ndata: expected key 'label', got \['feat'"):
        from_dgl(graph)
    pairs = (torch.tensor([0]), torch.tensor([0]))
    hetero = dgl.heterograph({("a", "x", "a"): pairs, ("a", "z", "a"): pairs})
    with pytest.raises(DataError, match="expected one node type and one edge type"):
        from_dgl(hetero)


def test_from_pyg_takes_data_with_column_labels_and_many_splits():
    good = parts_of_graph()
    masks = {name: good[name] for name in ("train_mask", "val_mask", "test_mask")}
    wide = {name: torch.stack([~mask & False, mask], dim=1) for name, mask in masks.items()}
    data = SimpleNamespace(
        edge_index=torch.stack([good["src"], good["dst"]]), x=good["feat"], y=good["label"][:, None]
    )
    data.num_nodes = 5
    data.__dict__.update(wide)
    assert same(from_pyg(data, split=1), from_edge_index(**good))
    with pytest.raises(DataError, match="split: expected 0 to 1, got 2"):
        from_pyg(data, split=2)
    del data.val_mask
    with pytest.raises(DataError, match=r"data.val_mask: missing; expected edge_index, x, y"):
        from_pyg(data)
