"""A toy stream and trainers of it, for the tests of the continual loop."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.models import TFTGN, TGAT, GraphSAGE, LinkHead
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.continual import ContinualTrainer
from shared.data.events import Events

NUM_SOURCES, NUM_DESTINATIONS, NUM_GROUPS = 24, 12, 3
MODELS = {
    "tgat": lambda: TGAT(dim=16, node_dim=NUM_GROUPS, num_layers=1, num_heads=2),
    "tf-tgn": lambda: TFTGN(dim=16, node_dim=NUM_GROUPS, num_blocks=1),
    "graphsage": lambda: GraphSAGE(dim=16, node_dim=NUM_GROUPS, num_layers=1),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # Threads that wait for one another on busy cores take a hundred times longer than one.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clubs(count=900, seed=0, *, shuffled=False):
    """Each source meets destinations of its own group, one event a minute."""
    draw = np.random.default_rng(seed)
    src = draw.integers(0, NUM_SOURCES, count)
    member = draw.integers(0, NUM_DESTINATIONS // NUM_GROUPS, count)
    dst = NUM_SOURCES + member * NUM_GROUPS + src % NUM_GROUPS
    if shuffled:
        dst = draw.permutation(dst)
    features = draw.standard_normal((count, 2)).astype(np.float32)
    return Events(src, dst, 60 * np.arange(count) + 1, features=features)


def node_rows():
    """Destinations tell their group, sources nothing: that is for their neighbours to tell."""
    rows = torch.zeros(NUM_SOURCES + NUM_DESTINATIONS, NUM_GROUPS)
    ids = torch.arange(NUM_DESTINATIONS)
    rows[NUM_SOURCES + ids, ids % NUM_GROUPS] = 1
    return rows


def trainer_of(events, *, model=None, fanouts=(5,), policy="recent", cache=None, **settings):
    torch.manual_seed(1)
    features = FeatureStore(node=node_rows(), edge=events.features)
    if cache:
        features = FeatureCache(features, **cache)
    graph = TemporalGraph(undirected=True)
    sampler = TemporalSampler(graph, list(fanouts), policy=policy, seed=2)
    if model is None:
        model = TGAT(dim=16, node_dim=NUM_GROUPS, num_layers=len(fanouts), num_heads=2)
    settings = {"batch_size": 50, "every": 100, "num_negatives": 3, "progress": False} | settings
    return ContinualTrainer(model, graph, sampler, features, head=LinkHead(16), **settings)


def adam(rate):
    return lambda params: torch.optim.Adam(params, lr=rate)


def curve(rounds):
    """What a run decides, without the seconds it took."""
    return [
        (r.index, r.time, r.num_events, r.num_replayed, r.loss, r.ap, r.auc, r.mrr) for r in rounds
    ]


class Remembers(nn.Module):
    """A model with memory: counts how often each node was committed, and logs its hooks."""

    layout, uses_time, dim = "mfg", True, 16

    def __init__(self):
        super().__init__()
        self.inner = TGAT(dim=16, node_dim=NUM_GROUPS, num_layers=1, num_heads=2)
        self.counts = None
        self.log = []

    def forward(self, sample, inputs):
        return self.inner(sample, inputs) + 0.01 * self.counts[sample.layers[0].roots][:, None]

    def reset_state(self):
        self.log.append("reset")
        self.counts = torch.zeros(100)

    def commit(self, events):
        self.log.append(events.eid.tolist())
        self.counts = self.counts + torch.bincount(
            torch.cat([events.src, events.dst]), minlength=100
        )

    def state(self):
        return {"counts": self.counts.clone()}

    def load_state(self, state):
        self.log.append("load")
        self.counts = state["counts"].clone()


@pytest.fixture(scope="session")
def toy():
    return SimpleNamespace(
        num_groups=NUM_GROUPS,
        models=MODELS,
        clubs=clubs,
        node_rows=node_rows,
        trainer_of=trainer_of,
        adam=adam,
        curve=curve,
        Remembers=Remembers,
    )
