"""The generated graph: its counts, and that classes can be learned from neighbours."""

import functools

import pytest
import torch

from heta.data.mag import mag_like
from shared.errors import ConfigError


@functools.cache
def small(seed=0):
    return mag_like(0.01, seed)


def test_has_the_schema_of_ogbn_mag_to_scale():
    schema = small().schema
    assert schema.num_nodes == {
        "paper": 7364,
        "author": 11346,
        "institution": 87,
        "field_of_study": 600,
    }
    counts = {name: count for (_, name, _), count in schema.num_edges.items()}
    assert counts == {
        "affiliated_with": 10440,
        "rev_affiliated_with": 10440,
        "writes": 71457,
        "rev_writes": 71457,
        "cites": 54163,
        "rev_cites": 54163,
        "has_topic": 75051,
        "rev_has_topic": 75051,
    }
    assert [name for _, name, _ in schema.roots] == [
        "writes",
        "cites",
        "rev_cites",
        "rev_has_topic",
    ]
    assert schema.learnable == ("author", "institution", "field_of_study")


def test_edges_are_distinct_without_loops_and_reversed():
    graph = small()
    for (kind, name, other), (src, dst) in graph.edges.items():
        keys = src * graph.num_nodes[other] + dst
        assert len(keys.unique()) == len(keys)
        if kind == other:
            assert (src != dst).all()
        if not name.startswith("rev_"):
            back = graph.edges[other, f"rev_{name}", kind]
            assert torch.equal(back[0], dst)
            assert torch.equal(back[1], src)


def test_depends_on_the_seed_only():
    assert small().fingerprint() == mag_like(0.01, 0).fingerprint()
    assert small().fingerprint() != mag_like(0.01, 1).fingerprint()


def test_splits_have_each_paper_once():
    masks = small().masks
    assert (sum(mask.int() for mask in masks.values()) == 1).all()
    assert masks["train"].float().mean() == pytest.approx(0.855, abs=0.001)


def test_neighbours_tell_more_of_the_class_than_features_do():
    graph = small()
    label, train, test = graph.label, graph.masks["train"], graph.masks["test"]
    one_hot = torch.nn.functional.one_hot(label).float() * train[:, None]
    votes = torch.zeros_like(one_hot)
    for name in ("cites", "rev_cites"):
        src, dst = graph.edges["paper", name, "paper"]
        votes.index_add_(0, dst, one_hot[src])
    feat = graph.feat["paper"]
    sums = torch.zeros(graph.num_classes, feat.shape[1]).index_add_(0, label[train], feat[train])
    centres = sums / label[train].bincount()[:, None]
    by_neighbours = (votes.argmax(1) == label)[test].float().mean()
    by_features = (torch.cdist(feat, centres).argmin(1) == label)[test].float().mean()
    chance = 1 / graph.num_classes
    assert chance * 3 < by_features < 0.4
    assert by_neighbours > by_features + 0.2


def test_degrees_are_heavy_tailed():
    graph = small()
    for relation in graph.schema.relations:
        degree = graph.edges[relation][1].bincount(minlength=graph.num_nodes[relation[2]]).float()
        if relation[2] != "institution":
            assert degree.max() > 8 * degree.mean()


def test_works_at_the_least_scale():
    graph = mag_like(0.001)
    assert graph.num_nodes["institution"] == 9
    assert graph.label.unique().tolist() == list(range(7))


@pytest.mark.parametrize("scale", [0, 0.0009, -1, float("nan")])
def test_refuses_small_scales(scale):
    with pytest.raises(ConfigError, match=r"scale: expected at least 0.001, got"):
        mag_like(scale)
