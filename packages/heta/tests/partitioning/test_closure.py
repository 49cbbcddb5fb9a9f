"""Closures: against walking back from the roots one edge of the schema at a time."""

import pytest
from schemas import draw_schema

from heta.graph.schema import Schema
from heta.partitioning.closure import closure, read_types
from shared.errors import ConfigError


@pytest.mark.parametrize("seed", range(8))
def test_closure_is_what_walks_back_from_the_roots_meet(seed):
    schema = draw_schema(seed, num_roots=3)
    roots = schema.roots[:2]
    paths = [[root] for root in roots]
    for hop, relations in enumerate(closure(schema, roots, 4)):
        assert relations == {path[hop] for path in paths}
        paths = [[*path, r] for path in paths for r in schema.relations if r[2] == path[-1][0]]


def test_closure_keeps_parallel_and_self_relations_apart():
    edges = {("a", "x", "b"): 1, ("a", "y", "b"): 1, ("b", "own", "b"): 1, ("b", "back", "a"): 1}
    schema = Schema({"a": 2, "b": 2}, edges, {}, "b")
    hops = closure(schema, [("b", "own", "b")], 2)
    assert hops == [{("b", "own", "b")}, {("a", "x", "b"), ("a", "y", "b"), ("b", "own", "b")}]
    assert closure(schema, [], 3) == [set(), set(), set()]


@pytest.mark.parametrize(
    ("roots", "layers", "message"),
    [
        ([("a", "x", "b")], 0, "layers: expected at least 1, got 0"),
        ([("a", "z", "b")], 1, "roots: expected relations of the schema"),
    ],
)
def test_closure_refuses(roots, layers, message):
    schema = Schema({"a": 2, "b": 2}, {("a", "x", "b"): 1}, {}, "b")
    with pytest.raises(ConfigError, match=message):
        closure(schema, roots, layers)


def test_types_read_are_the_last_hops_sources_or_all_where_destinations_are_read():
    edges = {("a", "x", "t"): 1, ("c", "y", "a"): 1, ("d", "z", "c"): 1}
    schema = Schema(dict.fromkeys("tacd", 2), edges, {}, "t")
    hops = closure(schema, schema.roots, 2)
    assert read_types(hops, "t", uses_dst=False) == ("c",)
    assert read_types(hops, "t", uses_dst=True) == ("a", "c", "t")
