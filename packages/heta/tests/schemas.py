"""Schemas that the planner's tests share."""

import numpy as np

from heta.graph.schema import Schema


def mag(scale=0.2):
    """ogbn-mag's published counts, authors, fields and institutions without features."""
    nodes = {"paper": 736389, "author": 1134649, "institution": 8740, "field": 59965}
    edges = {
        ("paper", "cites", "paper"): 5416271,
        ("paper", "cited_by", "paper"): 5416271,
        ("author", "writes", "paper"): 7145660,
        ("field", "topic_of", "paper"): 7505078,
        ("paper", "written_by", "author"): 7145660,
        ("paper", "has_topic", "field"): 7505078,
        ("author", "affiliated", "institution"): 1043998,
        ("institution", "employs", "author"): 1043998,
    }
    return Schema(
        {kind: int(count * scale) for kind, count in nodes.items()},
        {relation: int(count * scale) for relation, count in edges.items()},
        {"paper": 128},
        "paper",
    )


def draw_schema(seed, num_roots, num_types=5, num_others=8):
    """A random schema in which every type has an in-relation."""
    random = np.random.default_rng(seed)
    kinds = [f"type{number}" for number in range(num_types)]
    nodes = {kind: int(10 ** random.uniform(1, 6)) for kind in kinds}

    def count(kind):
        return int(nodes[kind] * 10 ** random.uniform(-1, 1.5))

    edges = {
        (kinds[random.integers(num_types)], f"root{number}", kinds[0]): count(kinds[0])
        for number in range(num_roots)
    }
    for number in range(max(num_others, num_types - 1)):
        dst = kinds[1 + number % (num_types - 1)]
        edges[kinds[random.integers(num_types)], f"other{number}", dst] = count(dst)
    dims = {kind: int(random.integers(8, 256)) for kind in kinds if random.random() < 0.6}
    return Schema(nodes, edges, dims, kinds[0])
