"""The continual loop learns, replays, forgets, feeds stores and caches, and refuses nonsense."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch import nn

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.models import TGAT, LinkHead
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.continual import ContinualTrainer
from gnnflow.training.settings import Settings
from shared.data.events import Events
from shared.errors import ConfigError, DataError, DivergenceError


@pytest.mark.parametrize(
    ("name", "epochs", "rate"), [("tgat", 6, 0.01), ("tf-tgn", 8, 0.005), ("graphsage", 3, 0.02)]
)
def test_learns_what_a_shuffled_stream_does_not_have(toy, name, epochs, rate):
    scores = {}
    for shuffled in (False, True):
        events = toy.clubs(700, shuffled=shuffled)
        settings = {"warmup": 0.6, "warmup_epochs": epochs, "every": 140}
        settings["optimizer"] = toy.adam(rate)
        torch.manual_seed(7)
        trainer = toy.trainer_of(events, model=toy.models[name](), **settings)
        rounds = list(trainer.run(events))
        assert [r.index for r in rounds] == [1, 2]
        scores[shuffled] = np.mean([r.ap for r in rounds])
    # A third of the negatives are of the source's own group and cannot be told apart.
    assert scores[False] > 0.66
    assert scores[True] < 0.58


def test_replay_and_window(toy, monkeypatch):
    events = toy.clubs(600)
    trainer = toy.trainer_of(events, warmup=0.5, every="1h", replay=0.1, window="2h")
    graph, drawn = trainer.history.graph, []
    inner = trainer.history.replay.draw

    def draw(*given):
        drawn.append((*given, inner(*given)))
        return drawn[-1][-1]

    monkeypatch.setattr(trainer.history.replay, "draw", draw)
    for one in trainer.run(events):
        start = 300 + 60 * (one.index - 1)
        assert one.time == events.t[start]
        assert one.num_events == 60
        # Two hours back are 120 events, and the 60 new ones are in the graph as well.
        assert graph.num_edges == 180
        assert one.num_replayed == 12
        first, end, index, places = drawn[-1]
        assert (first, end, index) == (start - 120, start, one.index)
        assert (places >= first).all()
    assert len(drawn) == 5
    plain = toy.trainer_of(events, warmup=0.5, every="1h", replay=0.1)
    counts = [one.num_replayed for one in plain.run(events)]
    assert counts == [int(0.1 * (300 + 60 * at)) for at in range(5)]
    assert plain.history.graph.num_edges == 600


def test_caches_and_growing_stores_change_no_number(toy):
    events = toy.clubs(330)
    dims = {"dim": 16, "node_dim": toy.num_groups, "edge_dim": 2, "num_layers": 1, "num_heads": 2}

    def make(features, **settings):
        torch.manual_seed(4)
        graph = TemporalGraph(undirected=True)
        return ContinualTrainer(
            TGAT(**dims), graph, TemporalSampler(graph, [5]), features,
            head=LinkHead(16), every=70, batch_size=50, progress=False, **settings,
        )  # fmt: skip

    expected = toy.curve(make(FeatureStore(toy.node_rows(), events.features)).run(events))
    growing = FeatureStore(toy.node_rows(), events.features[:0])
    assert toy.curve(make(growing).run(events)) == expected
    assert torch.equal(growing.gather("edge", events.eid), events.features)
    cache = FeatureCache(FeatureStore(toy.node_rows(), events.features[:0]), edge=0.2)
    assert toy.curve(make(cache).run(events)) == expected
    assert cache.stats()["edge"].hits > 0
    plain = FeatureCache(FeatureStore(toy.node_rows(), events.features), edge=0.2)
    assert toy.curve(make(plain, restore=False).run(events)) == expected
    # Rows may end within an increment.
    partial = FeatureStore(toy.node_rows(), events.features[:200])
    assert toy.curve(make(partial).run(events)) == expected
    bare = Events(events.src, events.dst, events.t)
    with pytest.raises(DataError, match=r"for each event up to id 98, there are 0"):
        list(make(FeatureStore(toy.node_rows(), events.features[:0])).run(bare))


def test_a_round_begins_with_its_edges_in_the_cache(toy, monkeypatch):
    events, restored = toy.clubs(260), []
    plain = FeatureCache.restore
    monkeypatch.setattr(
        FeatureCache, "restore", lambda self, eids: restored.append(eids) or plain(self, eids)
    )
    trainer = toy.trainer_of(events, cache={"edge": 0.2}, warmup=0.5, replay=0.1)
    rounds = list(trainer.run(events))
    places = [trainer.history.replay.draw(0, start, at) for at, start in ((1, 130), (2, 230))]
    assert [one.num_replayed for one in rounds] == [13, 23]
    for found, replayed, (start, end) in zip(
        restored, [places[0][:0], *places], [(0, 130), (130, 230), (230, 260)], strict=True
    ):
        assert found.tolist() == [*replayed.tolist(), *range(start, end)]


def test_rounds_tell_the_seconds_of_their_stages(toy):
    events = toy.clubs(400)
    trainer = toy.trainer_of(events, cache={"edge": 0.2})
    rounds = list(trainer.run(events))
    assert trainer.rounds == rounds
    assert trainer.warmed.num_events == 120
    assert math.isnan(trainer.warmed.ap)
    assert trainer.warmed.evaluate_s == 0
    for one in rounds:
        for stage in ("insert", "evaluate", "sample", "fetch", "train"):
            assert getattr(one, f"{stage}_s") > 0


def test_an_unsorted_stream_is_sorted(toy):
    events = toy.clubs(150)
    order = torch.randperm(150)
    assert toy.curve(toy.trainer_of(events).run(events[order])) == toy.curve(
        toy.trainer_of(events).run(events)
    )


def test_training_negatives_are_random_whatever_evaluation_has(toy):
    events = toy.clubs(150)
    losses = {}
    for kind in ("random", "historical", "inductive"):
        rounds = list(toy.trainer_of(events, negatives=kind).run(events))
        losses[kind] = [one.loss for one in rounds]
        if kind == "inductive":
            assert toy.trainer_of(events).history.negatives.since is None
    assert losses["random"] == losses["historical"] == losses["inductive"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 1.0}, "warmup: expected a share"),
        ({"every": "x"}, "every: expected a number above 0"),
        ({"window": -1.0}, "window: expected a number above 0"),
        ({"replay": -1.0}, "replay: expected a share"),
        ({"negatives": "hard"}, "negatives: expected one of random, historical"),
        ({"num_negatives": 0}, "num_negatives: expected 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size: expected 1 or more"),
        ({"epochs": 0}, "epochs: expected 1 or more"),
        ({"warmup_epochs": 0}, "warmup_epochs: expected 1 or more"),
        ({"metric": "loss"}, r"metric: expected one of \['ap', 'auc', 'mrr'\], got 'loss'"),
        ({"checkpoint_every": 0}, "checkpoint_every: expected 1 or more, got 0"),
    ],
)
def test_settings_are_refused(toy, changes, message):
    with pytest.raises(ConfigError, match=message):
        toy.trainer_of(toy.clubs(10), **changes)


def test_a_grain_that_is_none_is_refused(unchecked):
    with pytest.raises(
        ConfigError, match=r"grain: expected one of \['event', 'batch'\], got 'hour'"
    ):
        Settings(grain="hour")


def test_settings_come_in_one_object_or_by_name(toy):
    events = toy.clubs(300)
    by_name = toy.trainer_of(events, window=500.0)
    in_one = toy.trainer_of(events, settings=replace(by_name.settings, window=9.0), window=500.0)
    assert in_one.settings == by_name.settings
    assert toy.curve(in_one.run(events)) == toy.curve(by_name.run(events))
    with pytest.raises(FrozenInstanceError):
        by_name.settings.window = 1.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        toy.trainer_of(events, windows=500.0)


def test_the_head_is_as_wide_as_the_model(toy):
    graph = TemporalGraph(undirected=True)
    sampler, features = TemporalSampler(graph, [5]), FeatureStore(node=toy.node_rows())
    settings = {"every": 50, "progress": False}
    trainer = ContinualTrainer(toy.models["tgat"](), graph, sampler, features, **settings)
    assert isinstance(trainer.head, LinkHead)
    before = [weight.clone() for weight in trainer.head.parameters()]
    assert len(list(trainer.run(toy.clubs(100)))) == 2
    # It is trained with the model.
    after = trainer.head.parameters()
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_what_does_not_fit_is_refused(toy):
    graph = TemporalGraph()
    model = TGAT(dim=16, node_dim=toy.num_groups, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match="expected a sampler of the graph given"):
        ContinualTrainer(model, graph, TemporalSampler(TemporalGraph(), [5]), head=LinkHead(16))
    with pytest.raises(ConfigError, match="Linear has no dim"):
        ContinualTrainer(nn.Linear(2, 2), graph, TemporalSampler(graph, [5]))
    trainer = toy.trainer_of(toy.clubs(200))
    with pytest.raises(DataError, match="run: expected at least one event"):
        next(trainer.run(Events([], [], [])))
    with pytest.raises(DataError, match="evaluate: expected at least one event"):
        trainer.evaluate(Events([], [], []))
    list(trainer.run(toy.clubs(200)))
    with pytest.raises(ConfigError, match="expected a trainer that has not run"):
        next(trainer.run(toy.clubs(200)))


def test_a_loss_that_is_not_finite_is_told(toy):
    def wild(params):
        return torch.optim.SGD(params, lr=1e30)

    trainer = toy.trainer_of(toy.clubs(400), optimizer=wild)
    told = (
        r"round \d: .*(expected a finite loss, got nan|expected numbers, got NaN).*lower the learn"
    )
    with pytest.raises(DivergenceError, match=told):
        list(trainer.run(toy.clubs(400)))


@pytest.mark.parametrize("fresh", [False, True])
def test_an_optimiser_is_kept_or_made_anew_and_rounds_drop_apart(toy, monkeypatch, fresh):
    events, seeds = toy.clubs(330), []
    plain = torch.manual_seed
    trainer = toy.trainer_of(events, warmup=0.5, every=60, fresh_optimizer=fresh)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or plain(seed))
    optimizers = [trainer.optimizer for _ in trainer.run(events)]
    assert len(optimizers) == 3
    assert len({id(one) for one in optimizers}) == (3 if fresh else 1)
    # The warm-up's and each round's.
    assert len(set(seeds)) == len(seeds) == 4
