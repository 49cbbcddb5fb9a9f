"""Codes of nodes against a loop over edges."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.relation_codes import relation_code

RELATIONS = [("a", "to", "b"), ("a", "beside", "b"), ("b", "back", "a"), ("b", "self", "b")]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_against_a_loop_over_edges(rows):
    edges = {relation: ([], []) for relation in RELATIONS}
    code = {kind: torch.zeros(4, len(RELATIONS)) for kind in "ab"}
    degree = {kind: torch.zeros(4, 1) for kind in "ab"}
    for number, src, dst in rows:
        relation = RELATIONS[number]
        edges[relation][0].append(src)
        edges[relation][1].append(dst)
        code[relation[0]][src, number] -= 1
        code[relation[2]][dst, number] += 1
        degree[relation[0]][src] += 1
        degree[relation[2]][dst] += 1
    graph = HeteroGraph({"a": 4, "b": 4}, edges, target="b")
    codes = relation_code(graph)
    assert list(codes) == ["a", "b"]
    for kind, rows_of_kind in codes.items():
        expected = code[kind] / degree[kind].clamp(min=1)
        torch.testing.assert_close(rows_of_kind, expected)


def test_loops_cancel_and_isolated_nodes_have_zeros():
    relation = ("a", "self", "a")
    graph = HeteroGraph({"a": 4}, {relation: ([0, 0, 1], [0, 1, 2])}, target="a")
    expected = [[-1 / 3], [0.0], [1.0], [0.0]]
    torch.testing.assert_close(relation_code(graph)["a"], torch.tensor(expected))
