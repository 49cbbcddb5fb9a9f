"""Schemas: what they derive, JSON, and every refusal."""

import json

import pytest

from heta.graph.schema import Schema, name_relation
from shared.errors import DataError

WRITES, BY, CITES, CITED = (
    ("author", "writes", "paper"),
    ("paper", "by", "author"),
    ("paper", "cites", "paper"),
    ("paper", "cited:by.\u00fc", "paper"),
)


def papers(**changes):
    fields = {
        "num_nodes": {"paper": 5, "author": 3, "journal": 0},
        "num_edges": {WRITES: 4, BY: 4, CITES: 6, CITED: 6},
        "feat_dim": {"paper": 8},
        "target": "paper",
    }
    return Schema(**(fields | changes))


def test_derives_types_relations_and_learnable_rows():
    schema = papers()
    assert schema.types == ("paper", "author", "journal")
    assert schema.relations == (WRITES, BY, CITES, CITED)
    assert schema.roots == schema.into("paper") == (WRITES, CITES, CITED)
    assert schema.into("author") == (BY,)
    assert schema.learnable == ("author",)
    assert papers(feat_dim={"paper": 8, "author": 0}).learnable == ("author",)
    assert name_relation(WRITES) == "author -writes-> paper"


def test_parallel_and_self_relations_with_any_names_survive_json():
    odd = {("a:b", 'to."', "a:b"): 2, ("a:b", "to.", "c\n"): 1, ("a:b", "to", "c\n"): 1}
    schema = Schema({"c\n": 2, "a:b": 3}, odd, {}, "c\n")
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert again.relations == schema.relations
    assert again.types == schema.types


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "book"}, r"one of the types \['paper', 'author', 'journal'\], got 'book'"),
        (
            {"target": "journal"},
            r"target 'journal': expected a relation into it, got relations into \['paper', 'author'\]",
        ),
        (
            {"num_edges": {WRITES: 1, ("paper", "in", "shelf"): 1}},
            r"paper -in-> shelf: expected one of the types .* got 'shelf'",
        ),
        ({"num_nodes": {"paper": -1, "author": 3}}, "num_nodes of 'paper': .* got -1"),
        ({"num_edges": {WRITES: -4}}, "num_edges of .*: expected a whole number from 0, got -4"),
        ({"feat_dim": {"paper": -8}}, "feat_dim of 'paper'"),
        ({"feat_dim": {"shelf": 8}}, "feat of type 'shelf': expected one of the types"),
        (
            {"num_edges": {WRITES: 1, ("journal", "prints", "paper"): 1}},
            "journal -prints-> paper: expected no edges, as type 'journal' has no nodes, got 1",
        ),
        (
            {"num_edges": {WRITES: 1, ("journal", "prints", "paper"): 0}},
            "type 'journal' of relation journal -prints-> paper: expected nodes, or features",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(DataError, match=message):
        papers(**changes)


def test_accepts_a_type_without_nodes_whose_width_is_known():
    counts = {WRITES: 1, ("journal", "prints", "paper"): 0}
    schema = papers(num_edges=counts, feat_dim={"journal": 3})
    assert schema.learnable == ("paper", "author")


def test_refuses_broken_json():
    fields = papers().to_json()
    with pytest.raises(DataError, match="expected num_nodes, num_edges, feat_dim and target"):
        Schema.from_json({key: fields[key] for key in fields if key != "target"})
    with pytest.raises(DataError, match=r"expected each relation once, got .*writes"):
        Schema.from_json(fields | {"num_edges": fields["num_edges"] + fields["num_edges"][:1]})
    with pytest.raises(DataError, match="expected num_nodes"):
        Schema.from_json(fields | {"num_edges": [["author", "writes"]]})
