"""Evaluation pools all scores and leaves memory as it was; EdgeBank is a plain table of pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.data.sampler import Sampler
from mspipe.data.streams import zipf
from mspipe.evaluation import EdgeBank, evaluate, score_links
from mspipe.memory.node_memory import NodeMemory
from mspipe.models import TGN
from mspipe.pipeline.pipeline import Pipeline
from shared.data import metrics
from shared.errors import ConfigError, DataError

EVENTS = zipf(40, 600, 2, edge_dim=3)
TRAIN, VAL, TEST = EVENTS.split(0.6, 0.2)


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    model = TGN(8, 3, dropout=0.0)
    memory = NodeMemory(EVENTS.num_nodes, model.dim, model.mail_dim)
    return Pipeline(model, memory, Sampler(EVENTS, [model.fanout]), EVENTS.features)


def ran(run):
    return [(out.pos.detach(), out.neg.detach()) for out in run]


def rows(pipe):
    return pipe.memory.snapshot()["rows"]


def test_memory_is_as_it_was_and_figures_are_the_same_again(pipe):
    ran(pipe.train(batches(TRAIN, 50)))
    before, version = rows(pipe), pipe.memory.version
    found = evaluate(pipe, VAL, history=TRAIN, num_negatives=5, batch_size=20)
    assert list(found) == ["ap", "auc", "mrr"]
    assert torch.equal(rows(pipe), before)
    assert pipe.memory.version > version
    assert evaluate(pipe, VAL, history=TRAIN, num_negatives=5, batch_size=20) == found
    # History may as well be the whole stream up to the last event.
    assert evaluate(pipe, VAL, history=EVENTS[:480], num_negatives=5, batch_size=20) == found
    assert evaluate(pipe, VAL, history=TRAIN, num_negatives=5, batch_size=20, seed=1) != found
    assert pipe.model.training


def test_links_have_the_logits_of_a_batch_and_change_nothing(pipe):
    ran(pipe.train(batches(TRAIN, 50)))
    before = rows(pipe)
    asked = VAL[:40]
    found = score_links(pipe, asked.src, asked.dst, asked.t)
    assert torch.equal(rows(pipe), before)
    assert pipe.model.training
    assert torch.equal(score_links(pipe, asked.src, asked.dst, asked.t, batch_size=40), found)
    few = score_links(pipe, asked.src, asked.dst, asked.t, batch_size=7)
    assert few.tolist() == pytest.approx(found.tolist(), abs=1e-5)
    assert len(score_links(pipe, asked.src[:0], asked.dst[:0], asked.t[:0])) == 0
    ((expected, _),) = ran(pipe.score(batches(asked, 40)))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert not torch.equal(rows(pipe), before)


def test_scores_of_all_batches_are_pooled(pipe):
    ran(pipe.train(batches(TRAIN, 50)))
    negatives = Negatives(EVENTS, "historical")
    names = ("mrr", "hits@3", "ap", "auc")
    found = evaluate(
        pipe, VAL, negatives=negatives, num_negatives=4, batch_size=25, seed=9, metrics=names
    )
    cut = list(batches(VAL, 25, negatives, num_negatives=4, seed=9))
    scores = ran(pipe.score(cut))
    pos, neg = (torch.cat(parts) for parts in zip(*scores, strict=True))
    assert found == {
        "mrr": metrics.mrr(pos, neg),
        "hits@3": metrics.hits(pos, neg, 3),
        "ap": metrics.average_precision(pos, neg[:, 0]),
        "auc": metrics.auc(pos, neg[:, 0]),
    }
    means = [metrics.average_precision(p, n[:, 0]) for p, n in scores]
    assert sum(means) / len(means) != pytest.approx(found["ap"])


def test_memory_moves_on_where_it_is_asked_to(pipe):
    ran(pipe.train(batches(TRAIN, 50)))
    kept = evaluate(pipe, VAL)
    assert evaluate(pipe, VAL, commits=True) == kept
    after = rows(pipe)
    follows = evaluate(pipe, TEST)
    pipe.memory.reset()
    ran(pipe.train(batches(TRAIN, 50)))
    unmoved = evaluate(pipe, TEST)
    ran(pipe.score(batches(VAL)))
    assert torch.equal(rows(pipe), after)
    assert evaluate(pipe, TEST) == follows != unmoved


def test_kinds_of_negatives_are_drawn_from_history_and_events(pipe):
    for kind in ("random", "historical", "inductive"):
        drawn = Negatives(EVENTS[:480], kind, since=VAL.t[0].item())
        options = {"num_negatives": 3, "batch_size": 30}
        assert evaluate(pipe, VAL, history=TRAIN, negatives=kind, **options) == evaluate(
            pipe, VAL, negatives=drawn, **options
        )


@pytest.mark.parametrize("mode", ["sync", "prefetch", "forward", "stale"])
def test_an_open_run_refuses_and_goes_on_unharmed(pipe, mode, monkeypatch):
    pipe.mode = mode
    run = pipe.train(batches(TRAIN, 50))
    next(run)
    refused = pytest.raises(
        ConfigError, match="a pipeline's train is at work on it; finish or close"
    )
    with refused, monkeypatch.context() as patch:
        # Would undo what the run's threads write meanwhile.
        patch.setattr(pipe.memory, "preserved", pytest.fail)
        evaluate(pipe, VAL)
    assert len(list(run)) == 7
    if mode != "stale":
        after = rows(pipe)
        pipe.memory.reset()
        pipe.mode = "sync"
        ran(pipe.train(batches(TRAIN, 50)))
        assert torch.equal(rows(pipe), after)
    assert evaluate(pipe, VAL)["ap"] > 0


def test_a_failure_leaves_memory_as_it_was(pipe):
    ran(pipe.train(batches(TRAIN, 50)))
    before = rows(pipe)
    version = pipe.memory.version
    late = Events([1] * 3 + [99], [2, 3, 4, 5], [900] * 4)
    with pytest.raises(DataError, match="expected nodes below 40"):
        evaluate(pipe, late, batch_size=2)
    # One batch was written, and undone.
    assert pipe.memory.version == version + 2
    assert torch.equal(rows(pipe), before)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ConfigError, {"metrics": ("ap", "f1")}, r"some of ap, auc, .* got \('ap', 'f1'\)"),
        (ConfigError, {"metrics": "ap"}, "some of ap, auc, .* got 'ap'"),
        (ConfigError, {"num_negatives": 0}, "num_negatives of at least 1, got 0"),
        (ConfigError, {"batch_size": 0}, "batches of at least one event, got 0"),
        (DataError, {"events": EVENTS[:0]}, "at least one event, got none"),
    ],
)
def test_refuses(pipe, unchecked, error, options, message):
    options = {"events": VAL} | options
    with pytest.raises(error, match=message):
        evaluate(pipe, **options)
    with pytest.raises(error, match=message):
        EdgeBank().evaluate(TRAIN, **options)


streams = st.lists(
    st.tuples(st.integers(0, 3), st.integers(2, 6), st.integers(0, 3)), min_size=4, max_size=30
)


@pytest.mark.parametrize("window", [None, 0, 2.5])
@given(rows=streams, cut=st.integers(0, 3), size=st.integers(1, 8))
def test_edge_bank_is_a_table_of_pairs(window, rows, cut, size):
    src, dst, gaps = zip(*rows, strict=True)
    if len(set(dst[cut:])) < 2:
        return
    stream = Events(src, dst, torch.tensor(gaps).cumsum(0))
    history, events = stream[:cut], stream[cut:]
    negatives = Negatives(stream)
    found = EdgeBank(window).evaluate(
        history, events, negatives=negatives, num_negatives=3, batch_size=size
    )

    def remember(part):
        last.update(
            zip(zip(part.src.tolist(), part.dst.tolist(), strict=True), part.t, strict=True)
        )

    def score(src, dst, t):
        is_there = (src, dst) in last
        return is_there and (window is None or float(t - last[src, dst]) <= window)

    last, pos, neg = {}, [], []
    remember(history)
    for batch in batches(events, size, negatives, num_negatives=3):
        part = batch.events
        for src, dst, t, others in zip(
            part.src.tolist(), part.dst.tolist(), part.t, batch.negatives.tolist(), strict=True
        ):
            pos.append(score(src, dst, t))
            neg.append([score(src, other, t) for other in others])
        remember(part)
    first = [others[0] for others in neg]
    assert found == {
        "ap": metrics.average_precision(pos, first),
        "auc": metrics.auc(pos, first),
        "mrr": metrics.mrr(pos, neg),
    }


def test_edge_bank_remembers_and_forgets():
    bank = EdgeBank(window=10)
    src, dst, t = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), torch.tensor([5, 15, 16])
    assert bank.score(src, dst, t).tolist() == [False] * 3
    bank.remember(Events([0, 1], [1, 0], [1, 5]))
    assert bank.score(src, dst, t).tolist() == [True, False, False]
    bank.remember(Events([1], [0], [6.5]))
    assert bank.score(src, dst, t).tolist() == [True, False, True]
    # An evaluation starts from history alone, and leaves what is remembered.
    figures = bank.evaluate(TRAIN, VAL, negatives="historical", num_negatives=5)
    assert figures == EdgeBank(10).evaluate(TRAIN, VAL, negatives="historical", num_negatives=5)
    assert bank.score(src, dst, t).tolist() == [True, False, True]
    assert EdgeBank().evaluate(None, EVENTS, batch_size=600)["auc"] == 0.5


def test_edge_bank_refuses():
    with pytest.raises(ConfigError, match="window of 0 or more, or None, got -1"):
        EdgeBank(-1)
    with pytest.raises(DataError, match=r"history that ends by the first event .* stream\[:n\]"):
        EdgeBank().evaluate(EVENTS, VAL)
    with pytest.raises(DataError, match=r"nodes below 2\^31, got 2147483648"):
        EdgeBank().remember(Events([0], [2**31], [1]))
