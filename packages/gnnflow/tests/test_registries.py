"""What is registered from outside is in the command line's help, and runs."""

import json
from functools import partial

import numpy as np
import pytest
import torch

import gnnflow as gf
from gnnflow.cli import main
from gnnflow.config import MODELS
from gnnflow.features.policies import CACHE_POLICIES, LRU
from gnnflow.models import TGAT
from gnnflow.models.spec import ModelEntry
from gnnflow.partitioning.methods import PARTITION_METHODS
from gnnflow.profiler import measure
from gnnflow.sampling.policies import SAMPLING_POLICIES
from gnnflow.sampling.policy import SamplingPolicy
from gnnflow.training.replay import UniformReplay
from gnnflow.training.replay_policies import REPLAY_POLICIES
from shared.kernels.temporal import MAX_FANOUT, TemporalBlock, sample

STREAM = ["zipf:60:900", "--every", "300", "--dim", "8", "--fanouts", "3"]


def sample_oldest(adjacency, roots, root_times, fanout, *, replace, before, since, key):
    """The oldest edges of each root, oldest first: the end of all of its edges, newest first."""
    found = sample(adjacency, roots, root_times, MAX_FANOUT, before=before, since=since)
    counts = torch.bincount(found.row, minlength=len(roots))
    ends = counts.cumsum(0)[found.row]
    kept = torch.flip(torch.nonzero(ends - torch.arange(len(found.row)) <= fanout)[:, 0], [0])
    kept = kept[torch.argsort(found.row[kept], stable=True)]
    columns = (found.nodes, found.times, found.dt, found.eids, found.row)
    return TemporalBlock(roots, root_times, *(column[kept] for column in columns))


OLDEST = SamplingPolicy(sample_hop=sample_oldest, is_random=False, is_newest_first=False)


@pytest.fixture
def registered():
    """Registers entries under a name, and takes them out again."""
    added = []

    def add(registry, name, entry):
        registry.add(name, entry, "of a test")
        added.append((registry, name))

    yield add
    for registry, name in added:
        registry.remove(name)


def options_of(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_a_sampling_policy_from_outside(registered, capsys, tmp_path):
    assert "oldest" not in options_of("continual", capsys)
    registered(SAMPLING_POLICIES, "oldest", OLDEST)
    assert "{None,recent,uniform,oldest}" in options_of("continual", capsys).replace("\n", "")
    graph = gf.TemporalGraph()
    graph.add_edges([0] * 5 + [1] * 2, range(1, 8), range(7))
    layer = gf.TemporalSampler(graph, [2], policy="oldest").sample([0, 1, 0], [9, 9, 4]).layers[0]
    assert layer.nodes.tolist() == [1, 2, 6, 7, 1, 2]
    assert layer.row.tolist() == [0, 0, 1, 1, 2, 2]
    assert main(["continual", *STREAM, "--policy", "oldest", "--out", str(tmp_path)]) == 0
    assert "oldest" in measure(gf.data.zipf(20, 90), 50, 3).sampled_neighbors_per_s
    capsys.readouterr()


def test_a_sampling_policy_that_is_not_registered_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *STREAM[:1], "--policy", "oldest"])
    assert stopped.value.code == 2
    assert "invalid choice 'oldest'" in " ".join(capsys.readouterr().err.split())


def test_a_model_from_outside(registered, capsys):
    spec = ModelEntry(
        build=lambda sizes: TGAT(sizes.dim, 0, sizes.edge_dim, num_layers=1),
        fanouts=(3,), policy="recent", max_hops=1,
    )  # fmt: skip
    registered(MODELS, "flat", spec)
    assert "flat" in options_of("train", capsys)
    given = ["train", STREAM[0], "--dim", "8", "--epochs", "1", "--model", "flat", "--json"]
    assert main(given) == 0
    halves = json.loads(capsys.readouterr().out)["halves"]
    assert [half["num_events"] for half in halves] == [135, 135]
    assert main([*given, "--fanouts", "3", "3"]) == 1
    assert "flat reads 1 hop" in capsys.readouterr().err


def test_a_replay_policy_from_outside(registered, capsys, tmp_path):
    made = []

    def make(share, *, seed):
        made.append((share, seed))
        return UniformReplay(share, seed=seed)

    registered(REPLAY_POLICIES, "mine", make)
    assert "{uniform,structure,mine}" in options_of("continual", capsys).replace("\n", "")
    given = ["continual", *STREAM, "--replay-policy", "mine", "--seed", "3"]
    assert main([*given, "--out", str(tmp_path)]) == 0
    assert made == [(0.05, 3)]
    capsys.readouterr()


def test_a_partition_method_from_outside(registered, capsys, tmp_path):
    def first_part(events, num_parts, *, num_nodes, seed):
        return torch.zeros(num_nodes, dtype=torch.int64)

    registered(PARTITION_METHODS, "first", first_part)
    assert "first" in options_of("partition", capsys)
    out = tmp_path / "parts.npy"
    given = ["partition", "zipf:50:500", "--parts", "3", "--method", "first", "--json"]
    assert main([*given, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["edge_cut"] == 0
    assert not np.load(out).any()


def test_a_cache_policy_from_outside(registered, capsys):
    registered(CACHE_POLICIES, "recency", LRU)
    assert "{keep,lru,lfu,recency}" in options_of("train", capsys).replace("\n", "")
    make = partial(gf.FeatureCache, gf.FeatureStore(node=torch.rand(10, 2)), node=0.3)
    for cache in (make(policy="lru"), make(policy="recency")):
        cache.fetch("node", torch.tensor([1, 2, 3, 4, 2]))
        assert cache.held("node").tolist() == [2, 3, 4]
