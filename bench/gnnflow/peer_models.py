"""TGAT as PyG and tgm-lib have it, and what all ways of `bench_training` share.

A way remembers batches, or scores their events and negatives and remembers them then.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnnflow as gf
from gnnflow.sampling.distinct_roots import find_distinct_roots

BATCH, FANOUT, DIM, HEADS = 600, 10, 100, 2


class Stream(NamedTuple):
    """What all ways are given."""

    events: gf.Events
    negatives: Tensor  # int64 [num_events]
    nodes: Tensor  # float32 [num_nodes, DIM]

    def batch(self, number):
        at = slice(number * BATCH, (number + 1) * BATCH)
        part = self.events[at]
        return part, torch.cat([part.src, part.dst, self.negatives[at]])

    @property
    def features(self) -> Tensor:
        assert self.events.features is not None, "flights have features"
        return self.events.features


class Pyg(nn.Module):
    """`TransformerConv` over [features | encoded time] with PyG's loader of last neighbours."""

    def __init__(self, stream):
        super().__init__()
        layers = pytest.importorskip("torch_geometric.nn")
        tgn = pytest.importorskip("torch_geometric.nn.models.tgn")
        self.stream = stream
        self.loader = tgn.LastNeighborLoader(stream.events.num_nodes, FANOUT)
        self.time = tgn.TimeEncoder(DIM)
        with torch.no_grad():  # TGAT's frequencies
            self.time.lin.weight.copy_(10 ** torch.linspace(0, -9, DIM)[:, None])
            self.time.lin.bias.zero_()
        self.time.requires_grad_(False)  # as ours: learning them costs every way precision
        width = stream.features.shape[1] + DIM
        self.convs = nn.ModuleList(
            layers.TransformerConv(DIM, DIM // HEADS, heads=HEADS, edge_dim=width) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.head = gf.models.LinkHead(DIM)

    def remember(self, number):
        part, _ = self.stream.batch(number)
        self.loader.insert(part.src, part.dst)

    def forward(self, number):
        src, dst, other = self.embed(number).chunk(3)
        return self.head(src, dst), self.head(src, other)

    def embed(self, number):
        part, nodes = self.stream.batch(number)
        roots, place = torch.unique(nodes, return_inverse=True)
        near, near_edges, near_eids = self.loader(roots)
        far, far_edges, far_eids = self.loader(near)
        self.remember(number)
        x, t, now = self.stream.nodes, self.stream.events.t, part.t[0]
        # Layers compute the nodes that are asked for, and not those that only answer.
        far_edges = _towards(far_edges, far, near)
        h = self.layer(0, x[far], x[near], far_edges, far_eids, now - t[far_eids])
        near_edges = _towards(near_edges, near, roots)
        own = h[torch.searchsorted(near, roots)]
        return self.layer(1, h, own, near_edges, near_eids, now - t[near_eids])[place]

    def layer(self, depth, rows, own, edges, eids, dt):
        given = torch.cat([self.stream.features[eids], self.time(dt.float())], 1)
        return self.norms[depth](F.relu(self.convs[depth]((rows, own), edges, given)))


def _towards(edges, nodes, targets):
    """`edges` among `nodes`, with their ends among `targets` told by the place there."""
    place = torch.empty(len(nodes), dtype=torch.int64)
    place[torch.searchsorted(nodes, targets)] = torch.arange(len(targets))
    return torch.stack([edges[0], place[edges[1]]])


class PygOverHops(Pyg):
    """PyG's layers, each event at its own time, over our hops and with our distinct roots."""

    def __init__(self, stream):
        super().__init__(stream)
        self.graph = gf.TemporalGraph(undirected=True)
        self.sampler = gf.TemporalSampler(self.graph, [FANOUT, FANOUT])

    def remember(self, number):
        part, _ = self.stream.batch(number)
        self.graph.add_edges(part.src, part.dst, part.t, part.eid)

    def embed(self, number):
        part, nodes = self.stream.batch(number)
        # As in our way: of the batch's own edges, those before an event are its past.
        self.remember(number)
        sample = self.sampler.sample(nodes, part.t.repeat(3))
        ids, index = torch.unique(sample.nodes(), return_inverse=True)
        rows = self.stream.nodes[ids]
        for depth, block in enumerate(reversed(sample.snapshot(0))):
            kept, place = find_distinct_roots(block)
            target = torch.full_like(block.roots, -1)
            target[kept] = torch.arange(len(kept))
            target = target[block.row]
            used = (target >= 0).nonzero()[:, 0]
            edges = torch.stack([index[len(block.roots) + used], target[used]])
            rows = self.layer(
                depth, rows, rows[index[kept]], edges, block.eids[used], block.dt[used]
            )
            index = place
        return rows[index]


class GivenNegatives:
    """A hook of tgm-lib that hands out negatives in order, batch by batch."""

    requires = frozenset({"edge_src", "edge_dst", "edge_time"})
    produces = frozenset({"neg", "neg_time"})
    has_state = True

    def __init__(self, negatives):
        self.negatives = negatives.int().split(BATCH)
        self.reset_state()

    def reset_state(self):
        self.upcoming = iter(self.negatives)

    def __call__(self, dg, batch):
        batch.neg, batch.neg_time = next(self.upcoming), batch.edge_time
        return batch


class Tgm(nn.Module):
    """tgm-lib's TGAT of two layers: its attention, each followed by an MLP over [attended | own]."""

    def __init__(self, stream):
        super().__init__()
        tgm, hooks = pytest.importorskip("tgm"), pytest.importorskip("tgm.hooks")
        layers, data = pytest.importorskip("tgm.nn"), pytest.importorskip("tgm.data")
        self.none = pytest.importorskip("tgm.constants").PADDED_NODE_ID
        self.nodes, events = stream.nodes, stream.events
        self.time = layers.Time2Vec(DIM).requires_grad_(False)  # as for PyG's layers
        attention = [
            layers.TemporalAttention(HEADS, DIM, stream.features.shape[1], DIM, dropout=0.0)
            for _ in range(2)
        ]
        self.attention = nn.ModuleList(attention)
        self.merge = nn.ModuleList(
            nn.Sequential(nn.Linear(layer.out_dim + DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
            for layer in attention
        )
        self.head = layers.LinkPredictor(DIM, hidden_dim=DIM)
        asked = [["edge_src", "edge_dst", "neg"], ["edge_time", "edge_time", "neg_time"]]
        manager = hooks.HookManager(["all"])
        manager.register("all", GivenNegatives(stream.negatives))
        manager.register("all", hooks.RecencyNeighborHook(events.num_nodes, [FANOUT] * 2, *asked))
        manager.set_active_hooks("all")
        ends = torch.stack([events.src, events.dst], 1).int()
        graph = tgm.DGraph(data.DGData.from_raw(events.t, ends, stream.features))
        self.batches = iter(data.DGDataLoader(graph, batch_size=BATCH, hook_manager=manager))

    def remember(self, number):
        next(self.batches)

    def forward(self, number):
        src, dst, other = self.embed(next(self.batches)).chunk(3)
        return self.head(src, dst), self.head(src, other)

    def embed(self, batch):
        given = [self.nodes[at] for at in (batch.seed_nids[0], *batch.nbr_nids)]
        given = [rows.flatten(0, -2) for rows in given]
        rows = given
        for attention, merge in zip(self.attention, self.merge, strict=True):
            rows = [
                merge(torch.cat([self.attended(attention, batch, hop, *pair), given[hop]], 1))
                for hop, pair in enumerate(pairwise(rows))
            ]
        return rows[0]

    def attended(self, attention, batch, hop, own, neighbors):
        return attention(
            node_feat=own,
            time_feat=self.time(own.new_zeros(len(own))),
            edge_feat=batch.nbr_edge_x[hop],
            nbr_node_feat=neighbors.view(len(own), FANOUT, -1),
            nbr_time_feat=self.time(batch.seed_times[hop][:, None] - batch.nbr_edge_time[hop]),
            valid_nbr_mask=batch.nbr_nids[hop] != self.none,
        )
