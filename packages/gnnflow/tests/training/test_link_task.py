"""A pass over events looks only at the past, and an evaluation leaves no trace."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.continual import ContinualTrainer
from shared.data import metrics
from shared.data.events import Events
from shared.errors import ConfigError, DataError


class Acquainted(nn.Module):
    """Embeds a root by itself and by whom the sampler says it met; used with `acquainted`."""

    def __init__(self, uses_time):
        super().__init__()
        self.uses_time = uses_time
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, sample, inputs):
        block = sample.layers[0]
        met = torch.zeros(len(block.roots), 100)
        met[block.row, block.nodes] = 1
        return torch.cat([nn.functional.one_hot(block.roots, 100), met], 1) + 0 * self.weight


def acquainted(src, dst):
    return (src[..., 100:] * dst[..., :100]).sum(-1)


class Head(nn.Module):
    def forward(self, src, dst):
        return acquainted(src, dst)


@pytest.mark.parametrize("uses_time", [True, False])
@pytest.mark.parametrize("every", [1, 40, "7D"])
@pytest.mark.parametrize("grain", ["event", "batch"])
def test_an_event_never_sees_itself_or_its_own_time(uses_time, every, grain):
    # Every pair meets once, several at one time, so that having met is no reason to meet: whoever
    # looks at an event's own edge scores it above its negatives.
    pairs = np.random.default_rng(0).permutation(list(itertools.product(range(20), range(40, 60))))
    events = Events(pairs[:, 0], pairs[:, 1], np.arange(400) // 3)
    graph = TemporalGraph(undirected=True)
    trainer = ContinualTrainer(
        Acquainted(uses_time),
        graph,
        TemporalSampler(graph, [400]),
        head=Head(),
        warmup=0.5 if every != 1 else 0.9,
        every=every,
        grain=grain,
        batch_size=64,
        negatives="historical",
        num_negatives=2,
        progress=False,
    )
    for one in trainer.run(events):
        # Negatives are those met before, which score 1, and the event scores 0.
        assert one.mrr < 0.5


def test_evaluation_sees_just_what_one_event_at_a_time_would(toy, monkeypatch):
    events = toy.clubs(200, seed=3)
    events = Events(events.src, events.dst, events.t // 180, None, events.features)
    trainer = toy.trainer_of(events, warmup=0.5, every=50, fanouts=(4, 3), batch_size=20)
    task, scored = trainer.task, []
    score = task.score

    def recorded(batch, negatives, features):
        found = score(batch, negatives, features)
        if not task.model.training:
            scored.append((batch, negatives, features, *found))
        return found

    monkeypatch.setattr(task, "score", recorded)
    scores = trainer.evaluate
    model, head = task.model, task.head

    def checked(increment):
        found = scores(increment)
        # Each event by itself, on a graph of nothing but what was earlier.
        for at in range(0, len(increment), 6):
            batch, negatives, features, pos, neg = scored[at // 20]
            earlier = events[events.t < increment.t[at]]
            graph = TemporalGraph(undirected=True)
            graph.add_edges(earlier.src, earlier.dst, earlier.t, earlier.eid)
            task.sampler, row = TemporalSampler(graph, [4, 3]), at % 20
            one = slice(row, row + 1)
            with torch.no_grad():
                model.eval(), head.eval()
                expected = score(batch[one], negatives[one], features)
                model.train(), head.train()
            torch.testing.assert_close((pos[one], neg[one]), expected, atol=1e-5, rtol=1e-4)
        task.sampler = trainer.sampler
        pos, neg = (torch.cat([row[part] for row in scored]) for part in (3, 4))
        assert found.ap == metrics.average_precision(pos, neg[:, 0])
        assert found.auc == metrics.auc(pos, neg[:, 0])
        assert found.mrr == metrics.mrr(pos, neg)
        scored.clear()
        return found

    monkeypatch.setattr(trainer, "evaluate", checked)
    assert len(list(trainer.run(events))) == 2


@pytest.mark.parametrize(("uses_time", "num_times"), [(True, 20), (False, 1)])
def test_a_model_that_ignores_time_is_asked_once_a_node_and_batch(
    uses_time, num_times, monkeypatch
):
    events = Events(torch.arange(40) % 3, torch.arange(40) % 4 + 10, torch.arange(40))
    graph = TemporalGraph(undirected=True)
    sampler, asked = TemporalSampler(graph, [5]), []
    sample = sampler.sample

    def recorded(nodes, times, **options):
        asked.append((len(times), times.unique().tolist()))
        return sample(nodes, times, **options)

    monkeypatch.setattr(sampler, "sample", recorded)
    settings = {"warmup": 0.5, "every": 20, "batch_size": 20, "num_negatives": 2, "progress": False}
    trainer = ContinualTrainer(Acquainted(uses_time), graph, sampler, head=Head(), **settings)
    list(trainer.run(events))
    # Evaluated with two negatives an event, at the batch's own times or at that of its first event.
    assert (80, list(range(20, 20 + num_times))) in asked


def test_at_the_grain_of_a_batch_each_node_is_asked_for_once(monkeypatch):
    events = Events(torch.arange(40) % 3, torch.arange(40) % 4 + 10, torch.arange(40))
    graph = TemporalGraph(undirected=True)
    sampler, asked = TemporalSampler(graph, [5]), []
    sample = sampler.sample

    def recorded(nodes, times, **options):
        asked.append((nodes.tolist(), times.tolist()))
        return sample(nodes, times, **options)

    monkeypatch.setattr(sampler, "sample", recorded)
    settings = {"warmup": 0.5, "every": 20, "batch_size": 10, "num_negatives": 2, "progress": False}
    trainer = ContinualTrainer(
        Acquainted(True), graph, sampler, head=Head(), grain="batch", replay=0.0, **settings
    )
    list(trainer.run(events))
    nodes = [0, 1, 2, 10, 11, 12, 13]
    # The warm-up is learnt, and the increment evaluated and learnt, in two batches each.
    assert [times for _, times in asked] == [[t] * 7 for t in (0, 10, 20, 30, 20, 30)]
    assert all(found == nodes for found, _ in asked)


def test_at_the_grain_of_a_batch_scores_are_those_of_every_root_as_of_then(toy):
    events = toy.clubs(200)
    trainers = [toy.trainer_of(events, grain=grain) for grain in ("event", "batch")]
    found = []
    for trainer in trainers:
        trainer.history.insert(events)
        batch = events[100:150]
        if not found:  # each root is asked for by itself, as of the first event
            batch = Events(batch.src, batch.dst, batch.t[:1].expand(50), batch.eid)
        negatives = trainer.history.training_negatives.draw(events[100:150])
        trainer.model.eval()
        found.append(trainer.task.score(batch, negatives, trainer.history.features))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_passes_draw_apart_and_evaluations_alike(toy, monkeypatch):
    events, epochs = toy.clubs(200), []
    trainer = toy.trainer_of(events, warmup=0.5, every=50, epochs=2, policy="uniform")
    monkeypatch.setattr(trainer.sampler, "set_epoch", epochs.append)
    assert len(list(trainer.run(events))) == 2
    evaluations = [epoch for epoch in epochs if epoch == 0]
    passes = [epoch for epoch in epochs if epoch != 0]
    assert len(evaluations) == 2
    assert len(set(passes)) == len(passes) == 1 + 2 * 2


def fingerprint(trainer):
    """A digest of everything an evaluation might touch."""
    graph = trainer.history.graph
    found = hashlib.sha256(str((graph.stats(), graph.version, graph.newest)).encode())
    for column in graph.edges():
        found.update(column.numpy().tobytes())
    for module in (trainer.model, trainer.head):
        for name, tensor in module.state_dict().items():
            found.update(name.encode() + tensor.numpy().tobytes())
        found.update(str([part.training for part in module.modules()]).encode())
    for state in trainer.optimizer.state_dict()["state"].values():
        found.update(str({name: value.tolist() for name, value in state.items()}).encode())
    cache = trainer.history.features
    for kind in ("node", "edge"):
        found.update(cache.held(kind).numpy().tobytes())
    found.update(str(cache.stats()).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    if hasattr(trainer.model, "counts"):
        found.update(trainer.model.counts.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu", "keep"])
def test_evaluation_leaves_everything_as_it_was(toy, has_memory, policy):
    events = toy.clubs(400)
    trainer = toy.trainer_of(
        events,
        model=toy.Remembers() if has_memory else None,
        cache={"node": 0.3, "edge": 0.1, "policy": policy},
        policy="uniform",
    )
    run = trainer.run(events)
    next(run)
    next(run)
    before = fingerprint(trainer)
    first = trainer.evaluate(events[300:380])
    assert fingerprint(trainer) == before
    assert trainer.evaluate(events[300:380]) == first
    assert len(trainer.score(events[300:380])) == 80
    assert fingerprint(trainer) == before
    # Whatever part of the model is in training and whatever is not.
    trainer.model.eval()
    next(iter(trainer.model.children())).train()
    before = fingerprint(trainer)
    trainer.evaluate(events[300:380])
    assert fingerprint(trainer) == before
    next(run)
    assert fingerprint(trainer) != before


def test_evaluation_leaves_everything_as_it_was_even_when_it_fails(toy):
    events = toy.clubs(300)
    trainer = toy.trainer_of(events, model=toy.Remembers(), cache={"node": 0.5})
    next(trainer.run(events))
    before = fingerprint(trainer)
    strangers = Events(events.src[:60] + 90, events.dst[:60], events.t[:60] + 10**6)
    with pytest.raises(DataError, match="node ids in"):
        trainer.evaluate(strangers)
    assert fingerprint(trainer) == before


def test_links_in_any_order_have_the_logits_of_the_model(toy):
    events = toy.clubs(400)
    trainer = toy.trainer_of(events, batch_size=30)
    list(itertools.islice(trainer.run(events), 2))
    asked = events[300:380]
    trainer.model.eval()
    trainer.head.eval()
    with torch.no_grad():
        expected, _ = trainer.task.score(
            asked, torch.empty(80, 0, dtype=torch.int64), trainer.history.features
        )
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert trainer.score(asked[order]).tolist() == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert len(trainer.score(asked[:0])) == 0
    with pytest.raises(ConfigError, match="restore: expected a new trainer with a checkpoint"):
        trainer.restore(events)


def test_memory_takes_each_event_once_in_order(toy):
    events = toy.clubs(260)
    model = toy.Remembers()
    trainer = toy.trainer_of(
        events, model=model, warmup=0.5, every=50, batch_size=40, epochs=2, warmup_epochs=3
    )
    logs = []
    for _ in trainer.run(events):
        logs.append(model.log)
        model.log = []
        end = 130 + 50 * len(logs)
        ends = torch.cat([events.src[:end], events.dst[:end]])
        assert torch.equal(model.counts, torch.bincount(ends, minlength=100).float())
    assert logs[0][0] == "reset"
    assert "reset" not in sum(logs[1:], logs[0][1:])

    def batches(start, end):
        size = 40
        return [list(range(at, min(at + size, end))) for at in range(start, end, size)]

    # An evaluation and its undoing, then two passes, the second from where the first began. Replayed
    # events are in no commit.
    new = batches(180, 230)
    assert logs[1] == [*new, "load", *new, "load", *new]
    warm = batches(0, 130)
    assert logs[0][1 : 1 + 3 * len(warm) + 2] == [*warm, "load", *warm, "load", *warm]


class Half(nn.Module):
    layout, dim = "mfg", 16

    def commit(self, events):
        raise AssertionError("never called")


def test_some_of_the_hooks_are_an_error(toy):
    with pytest.raises(ConfigError, match=r"or none of them, got \['commit'\]"):
        toy.trainer_of(toy.clubs(10), model=Half())


class Wrapped(nn.Module):
    """As a wrapper for data parallelism is: the model one level down."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *given):
        return self.module(*given)


@pytest.mark.parametrize("name", ["tgat", "tf-tgn", "graphsage"])
def test_a_wrapped_model_is_trained_as_the_model_is(toy, name):
    events, found = toy.clubs(150), []
    for wrap in (lambda model: model, Wrapped):
        torch.manual_seed(3)
        found.append(toy.curve(toy.trainer_of(events, model=wrap(toy.models[name]())).run(events)))
    assert found[0] == found[1]
