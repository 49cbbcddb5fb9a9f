"""What mspipe and gnnflow both have is the same, and mspipe's TGN trains on gnnflow's graph."""

import numpy as np
import pytest
import torch

import gnnflow
import gnnflow.data
import mspipe
import mspipe.data
from gnnflow.training.link_task import LinkTask
from gnnflow.training.rounds import StageClock
from mspipe.models.hooked import Hooked
from shared.errors import DataError


def test_flights():
    try:
        ours, theirs = mspipe.data.flights(), gnnflow.data.flights()
    except DataError as error:
        pytest.skip(str(error))
    for name in ("src", "dst", "t", "eid", "features"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.label == theirs.label


@pytest.mark.parametrize(("num_nodes", "exponent"), [(2, 1.0), (300, 0.0), (5000, 1.3)])
def test_zipf(num_nodes, exponent):
    ours = mspipe.data.zipf(num_nodes, 2000, 4, exponent=exponent, edge_dim=2)
    theirs = gnnflow.data.zipf(num_nodes, 2000, 4, exponent=exponent)
    for name in ("src", "dst", "t", "eid"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.label == theirs.label


def test_an_event_of_a_node_with_itself_counts_once():
    src, dst, t = torch.tensor([3, 3, 1]), torch.tensor([3, 3, 3]), torch.tensor([1, 2, 3])
    ours = mspipe.Sampler(mspipe.Events(src, dst, t), [4])
    graph = gnnflow.TemporalGraph(undirected=True)
    graph.add_edges(src, dst, t)
    node, time = torch.tensor([3]), torch.tensor([9])
    theirs = gnnflow.TemporalSampler(graph, [4]).sample(node, time)
    assert ours.sample(node, time).eids.tolist() == theirs.layers[0].eids.tolist() == [2, 1, 0]


def test_tgn_is_scored_on_a_growing_graph_as_by_its_own_pipeline():
    """The same events, batches, negatives and weights: a static list here, a growing graph there."""
    events = mspipe.data.zipf(60, 500, seed=3, edge_dim=4)
    torch.manual_seed(0)
    model = mspipe.models.TGN(8, 4, fanout=5)
    memory = mspipe.NodeMemory(60, 8, model.mail_dim)
    pipe = mspipe.Pipeline(model, memory, mspipe.Sampler(events, [5]), events.features)
    batches = list(mspipe.batches(events, 50, num_negatives=2))
    expected = list(pipe.score(batches))

    hooked = Hooked(model.eval(), mspipe.NodeMemory(1, 8, model.mail_dim))
    graph = gnnflow.TemporalGraph(undirected=True)
    sampler, store = gnnflow.TemporalSampler(graph, [5]), gnnflow.FeatureStore(edge=events.features)
    task = LinkTask(hooked, model.head, sampler, 50, StageClock(torch.device("cpu")))
    with torch.no_grad():
        for batch, out in zip(batches, expected, strict=True):
            part = batch.events
            told = gnnflow.Events(part.src, part.dst, part.t, part.eid, events.features[part.eid])
            graph.add_edges(told.src, told.dst, told.t, told.eid)
            pos, neg = task.score(told, batch.negatives, store)
            torch.testing.assert_close(pos, out.pos, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(neg, out.neg, atol=1e-6, rtol=1e-5)
            hooked.commit(told)
    rows = [kept.snapshot()["rows"] for kept in (memory, hooked.memory)]
    torch.testing.assert_close(rows[1][:60], rows[0][: len(rows[1])], atol=1e-6, rtol=1e-5)


@pytest.mark.unchecked
def test_tgn_learns_in_the_continual_loop_and_evaluation_leaves_its_memory():
    # Features tell which of four kinds of destination an event is about.
    draw = np.random.default_rng(0)
    src = draw.integers(0, 20, 1500)
    dst = 20 + (src + 4 * draw.integers(0, 2, 1500)) % 8
    features = np.stack([np.cos(dst % 4 * np.pi / 2), np.sin(dst % 4 * np.pi / 2)], 1)
    events = gnnflow.Events(src, dst, np.arange(1500), features=features.astype(np.float32))
    curves = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mspipe.models.TGN(8, 2, fanout=5, dropout=0.0)
        hooked = Hooked(model, mspipe.NodeMemory(0, 8, model.mail_dim))
        graph = gnnflow.TemporalGraph(undirected=True)
        trainer = gnnflow.ContinualTrainer(
            hooked, graph, gnnflow.TemporalSampler(graph, [5]), gnnflow.FeatureStore(edge=events.features),
            head=mspipe.models.LinkHead(8), warmup=0.6, warmup_epochs=6, every=200, batch_size=50, num_negatives=2,
            optimizer=lambda params: torch.optim.Adam(params, 1e-2), progress=False,
        )  # fmt: skip
        curves.append([(one.loss, one.ap, one.mrr) for one in trainer.run(events)])
        before = hooked.memory.snapshot()["rows"]
        trainer.evaluate(events[1400:])
        assert torch.equal(hooked.memory.snapshot()["rows"], before)
    assert curves[0] == curves[1]
    assert np.mean([ap for _, ap, _ in curves[0]]) > 0.6
