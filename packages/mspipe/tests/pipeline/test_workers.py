"""Several workers give what one gives, whatever the model, the overlap and the place of the memory."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

from mspipe import models
from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.sampler import Sampler
from mspipe.evaluation import evaluate
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.server import MemoryServer
from mspipe.pipeline.pipeline import Pipeline
from mspipe.training import Settings, fit
from shared.comms import Group, RankPool
from shared.errors import ConfigError, DataError, RankFailure

MODELS = {
    "tgn": lambda: models.TGN(8, 3, time_dim=4, fanout=4),
    "jodie": lambda: models.JODIE(8, 3, time_dim=4),
    "apan": lambda: models.APAN(8, 3, time_dim=4, slots=3, fanout=4),
}
CASES = [
    ("tgn", {"mode": "sync"}, "cpu"),
    ("tgn", {"mode": "forward"}, "cpu"),
    ("tgn", {"mode": "forward", "depth": 1}, "shm"),
    ("tgn", {"mode": "prefetch"}, "cpu"),
    ("tgn", {"mode": "stale", "max_staleness": 3, "is_fixed": True}, "cpu"),
    ("jodie", {"mode": "forward"}, "shm"),
    ("apan", {"mode": "sync"}, "cpu"),
    ("apan", {"mode": "forward"}, "cpu"),
]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=timedelta(seconds=60)) as ranks:
        yield ranks


def events_of(count=330):
    """Few nodes, so that slices share most of them; some meet themselves; several events a moment."""
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 12, count), draw.integers(0, 20, count)
    features = draw.standard_normal((count, 3)).astype(np.float32)
    return Events(src, dst, np.sort(draw.integers(0, count, count)), features)


def pipeline_of(events, name, group=None, place="cpu", seed=0, **settings):
    torch.manual_seed(seed)
    model = MODELS[name]()
    memory = NodeMemory(events.num_nodes, model.dim, model.mail_dim, model.slots, place)
    sampler = Sampler(events, [model.fanout])
    pipe = Pipeline(model, memory, sampler, events.features, group=group, **settings)
    for module in pipe.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return pipe


def learn(pipe, events, size=37):
    """Losses of two passes, the last of whose batches are short, rows and weights."""
    optimizer = torch.optim.SGD(pipe.model.parameters(), 0.05)
    losses = []
    for epoch in range(2):
        pipe.memory.reset()
        for out in pipe.train(batches(events, size, num_negatives=2, seed=epoch)):
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            losses.append(out.loss.item())
    rows = pipe.memory.read_rows(torch.arange(events.num_nodes))
    return losses, rows, [parameter.detach() for parameter in pipe.model.parameters()]


def learn_on_ranks(cases, tag):
    group, found = Group.world(), []
    for number, (name, settings, place) in enumerate(cases):
        place = f"shm:{tag}-{number}-{group.rank}" if place == "shm" else place
        pipe = pipeline_of(events_of(count=160), name, group, place, **settings)
        found.append(learn(pipe, events_of(count=160)))
        pipe.memory.close()
    return found


@pytest.mark.unchecked
def test_losses_rows_and_weights_are_those_of_one_worker(pool, tmp_path):
    results = pool.run(learn_on_ranks, CASES, f"mspipe-test-{os.getpid()}").results
    for number, (name, settings, _) in enumerate(CASES):
        events = events_of(count=160)
        losses, rows, weights = learn(pipeline_of(events, name, **settings), events)
        first, second = (found[number] for found in results)
        assert first[0] != second[0], "each has its own slice"
        mean = (torch.tensor(first[0]) + torch.tensor(second[0])) / 2
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
        assert torch.equal(first[1], second[1])
        torch.testing.assert_close(first[1], rows, rtol=1e-4, atol=1e-5, msg=f"{name} {settings}")
        for one, other, alone in zip(first[2], second[2], weights, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-5)


def learn_events_one_by_one(name):
    return learn(pipeline_of(events_of(), name, Group.world()), events_of(count=9), size=1)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
def test_slices_may_be_empty(pool, name):
    results = pool.run(learn_events_one_by_one, name).results
    losses, rows, _ = learn(pipeline_of(events_of(), name), events_of(count=9), size=1)
    mean = torch.tensor([found[0] for found in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(results[0][1], rows, rtol=1e-4, atol=1e-5)


def fit_on_ranks(folder, epochs):
    events = events_of()
    train, rest = events.split(0.8)
    pipe = pipeline_of(events, "apan", Group.world())
    optimizer = torch.optim.Adam(pipe.model.parameters(), 1e-2)
    settings = Settings(epochs=epochs, batch_size=50, save_every=3)
    found = list(fit(pipe, optimizer, train, rest, settings, checkpoint=folder, progress=False))
    whole = evaluate(pipe, rest, history=train, batch_size=50)
    return [(epoch.losses, epoch.scores) for epoch in found], whole


@pytest.mark.unchecked
def test_fit_scores_alike_on_all_workers_and_goes_on(pool, tmp_path):
    events = events_of()
    train, rest = events.split(0.8)
    alone = pipeline_of(events, "apan")
    optimizer = torch.optim.Adam(alone.model.parameters(), 1e-2)
    settings = Settings(epochs=3, batch_size=50)
    expected = list(fit(alone, optimizer, train, rest, settings, progress=False))
    whole = pool.run(fit_on_ranks, tmp_path / "whole", 3).results
    pool.run(fit_on_ranks, tmp_path / "parts", 1)
    resumed = pool.run(fit_on_ranks, tmp_path / "parts", 3).results
    assert whole[0] == whole[1] == resumed[0] == resumed[1]
    for epoch, (losses, scores) in zip(expected, whole[0][0], strict=True):
        assert losses == pytest.approx(epoch.losses, rel=1e-3)
        assert scores == pytest.approx(epoch.scores, abs=0.02)


def learn_apart(what):
    group, events = Group.world(), events_of()
    pipe = pipeline_of(events, "tgn", group, seed=group.rank if what == "weights" else 0)
    sizes = 40 + group.rank if what == "batches" else 40
    if what == "shards":  # each its own events, as many
        events = events[group.rank * 160 : group.rank * 160 + 160]
    try:
        for number, out in enumerate(pipe.train(batches(events, sizes))):
            if what == "death" and number == 2 and group.rank:
                os._exit(3)
            out.loss.backward()
            if what == "steps" and group.rank:
                with torch.no_grad():
                    next(pipe.model.parameters()).add_(1e-3)
    except DataError as error:
        return str(error)
    return None


def learn_slowly(slow_s):
    """As `learn`, where the second worker writes late, and the first reads late."""
    group, events = Group.world(), events_of()
    pipe = pipeline_of(events, "tgn", group, mode="forward")
    name, rows = ("write" if group.rank else "read"), pipe.memory.rows
    quick = getattr(rows, name)

    def slow(*given):
        time.sleep(slow_s)
        return quick(*given)

    setattr(rows, name, slow)
    return learn(pipe, events)


def test_a_worker_that_lags_changes_nothing(pool):
    prompt, slow = (pool.run(learn_slowly, seconds).results for seconds in (0.0, 0.03))
    for one, other in zip(prompt, slow, strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


def learn_in_one_memory(place):
    events = events_of()
    memory = NodeMemory(events.num_nodes, 8, 19, 1, place)
    model = MODELS["tgn"]()
    pipe = Pipeline(model, memory, Sampler(events, [4]), events.features, group=Group.world())
    try:
        next(pipe.train(batches(events, 50)))
    except ConfigError as error:
        return str(error)
    finally:
        memory.close()
    return None


def test_one_memory_for_several_workers_is_refused(pool):
    for told in pool.run(learn_in_one_memory, f"shm:mspipe-one-{os.getpid()}").results:
        assert "expected a memory of its own for each of 2 workers" in told
    with MemoryServer() as server:
        for told in pool.run(learn_in_one_memory, server.address).results:
            assert f"place={server.address!r} here" in told


def gradients_otherwise():
    events = events_of()
    pipe = pipeline_of(events, "tgn", Group.world())
    out = next(pipe.train(batches(events, 50)))
    return [g is not None for g in torch.autograd.grad(out.loss, list(pipe.model.parameters()))]


def test_gradients_may_be_asked_for_without_being_kept(pool):
    first, second = pool.run(gradients_otherwise).results
    assert first == second
    assert all(first)


@pytest.mark.parametrize("what", ["weights", "batches", "steps", "shards"])
def test_workers_that_differ_are_told_apart(pool, what):
    told = pool.run(learn_apart, what).results
    name = "batches" if what in ("batches", "shards") else "weights"
    for text in told:
        assert f"expected the same {name} on all workers, got others on worker 1 than on 0" in text
        assert "step after out.loss.backward()" in text


def test_a_worker_that_dies_ends_the_others():
    with (
        RankPool(2, timeout=timedelta(seconds=100)) as ranks,
        pytest.raises(RankFailure, match="rank 1"),
    ):
        ranks.run(learn_apart, "death")
