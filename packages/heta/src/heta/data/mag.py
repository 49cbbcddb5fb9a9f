"""A generated graph of ogbn-mag's schema: its types, relations and counts, none of its content.

Nodes belong to communities, one a class of papers. Most edges join nodes of one community, so that a
paper's class can be learned from its neighbours, and a partitioner of nodes has something to find.
Degrees are heavy-tailed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation
from shared.errors import ConfigError

__all__ = ["mag_like"]

# ogbn-mag's counts, at scale 1.
_NUM_NODES = {
    "paper": 736_389,
    "author": 1_134_649,
    "institution": 8_740,
    "field_of_study": 59_965,
}
_NUM_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field_of_study"): 7_505_078,
}
_NUM_CLASSES, _PAPERS_A_CLASS = 349, 100
_FEATURE_DIM = 128
# Distance of the classes' centres, in deviations of a feature: weak beside what neighbours tell.
_SIGNAL = 0.15
_SHARES = {"train": 0.855, "val": 0.088, "test": 0.057}

# Share of a relation's edges that are drawn within a community.
_HOMOPHILY = {"affiliated_with": 0.5, "writes": 0.7, "cites": 0.6, "has_topic": 0.5}
# The node of rank r within a type is drawn with weight r ** -exponent.
_EXPONENT = 0.6
# Below it, fields are so few that papers would have most of them.
_LEAST_SCALE = 0.001


def mag_like(scale: float, seed: int = 0) -> HeteroGraph:
    """Generates a graph of ogbn-mag's schema, with `scale` times its nodes and edges.

    Papers have 128 features and 349 classes (one for each hundred papers where these are fewer);
    authors, institutions and fields of study have learnable rows. Each of the four relations has its
    reverse `rev_...`, and no edge twice, so that four relations lead to papers: `writes`, `cites`,
    `rev_cites` and `rev_has_topic`. Its accuracies say nothing of ogbn-mag's.

    Args:
        scale: from 0.001; 1 is as large as ogbn-mag.
        seed: what all draws depend on.

    Raises:
        ConfigError: the scale is too small.
    """
    if not scale >= _LEAST_SCALE:
        raise ConfigError(f"scale: expected at least {_LEAST_SCALE}, got {scale}")
    rng = np.random.default_rng(seed)
    num_nodes = {kind: round(count * scale) for kind, count in _NUM_NODES.items()}
    num_papers = num_nodes["paper"]
    num_classes = min(_NUM_CLASSES, num_papers // _PAPERS_A_CLASS)
    nodes = {kind: _Nodes.draw(rng, count, num_classes) for kind, count in num_nodes.items()}
    edges: dict[Relation, tuple[np.ndarray, np.ndarray]] = {}
    for (kind, name, other), count in _NUM_EDGES.items():
        ends = _draw_edges(
            rng, nodes[kind], nodes[other], round(count * scale), _HOMOPHILY[name], kind == other
        )
        edges[kind, name, other] = ends
        edges[other, f"rev_{name}", kind] = ends[::-1]
    label = nodes["paper"].community
    centres = rng.standard_normal((num_classes, _FEATURE_DIM), np.float32) * np.float32(_SIGNAL)
    feat = rng.standard_normal((num_papers, _FEATURE_DIM), np.float32)
    feat += centres[label]
    bounds = np.cumsum([round(share * num_papers) for share in _SHARES.values()])[:-1]
    splits = np.split(rng.permutation(num_papers), bounds)
    masks = {split: np.zeros(num_papers, bool) for split in _SHARES}
    for split, ids in zip(_SHARES, splits, strict=True):
        masks[split][ids] = True
    return HeteroGraph(num_nodes, edges, {"paper": feat}, target="paper", label=label, masks=masks)


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Nodes of a type, to be drawn by weight from all of them or from one community.

    Attributes:
        community: of each node [num_nodes].
        order: nodes by community [num_nodes].
        bounds: sums of weights before each node of `order`, and of all [num_nodes + 1].
        starts: sums of weights before each community, and of all [num_communities + 1].
    """

    community: np.ndarray
    order: np.ndarray
    bounds: np.ndarray
    starts: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, count: int, num_communities: int) -> _Nodes:
        """Draws each node's community and weight; each community that can have a node has one."""
        community = rng.permutation(
            np.concatenate(
                [
                    np.arange(count)[:num_communities],
                    rng.integers(0, num_communities, max(0, count - num_communities)),
                ]
            )
        )
        weight = rng.permutation(np.arange(1, count + 1) ** -_EXPONENT)
        order = np.argsort(community, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(weight[order])])
        firsts = np.searchsorted(community[order], np.arange(num_communities + 1))
        return cls(community, order, bounds, bounds[firsts])

    def choose(self, u: np.ndarray, community: np.ndarray | None = None) -> np.ndarray:
        """Returns a node for each number in [0, 1): of all nodes, or of a community each."""
        if community is None:
            sums = u * self.bounds[-1]
        else:
            first, last = self.starts[community], self.starts[community + 1]
            sums = first + u * (last - first)
        position = np.searchsorted(self.bounds, sums, side="right") - 1
        return self.order[np.minimum(position, len(self.order) - 1)]


def _draw_edges(
    rng: np.random.Generator,
    sources: _Nodes,
    destinations: _Nodes,
    count: int,
    homophily: float,
    is_self: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws distinct edges, without loops where the ends are of one type, in random order."""
    width = len(destinations.order)
    keys = np.empty(0, np.int64)
    while len(keys) < count:
        # A tenth more than is missing: most rounds lose some to duplicates.
        num_draws = (count - len(keys)) * 11 // 10 + 1
        src = sources.choose(rng.random(num_draws))
        # A community without destinations is one of very small scales.
        own = sources.community[src]
        is_near = rng.random(num_draws) < homophily
        is_near &= destinations.starts[own + 1] > destinations.starts[own]
        u = rng.random(num_draws)
        dst = np.where(is_near, destinations.choose(u, own), destinations.choose(u))
        if is_self:
            src, dst = src[src != dst], dst[src != dst]
        # Sorted and compared: np.unique hashes, which took ten times as long.
        keys = np.sort(np.concatenate([keys, src * width + dst]))
        keys = keys[np.diff(keys, prepend=-1) != 0]
    keys = rng.permutation(keys)[:count]
    return keys // width, keys % width
