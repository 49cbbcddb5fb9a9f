"""What goes wrong in a stage ends the run, is said where, and leaves whole iterations and no threads."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mspipe.data.batching import batches
from mspipe.data.sampler import Sampler
from mspipe.memory.node_memory import NodeMemory
from mspipe.pipeline import lanes
from mspipe.pipeline.pipeline import Pipeline
from shared.errors import ConfigError, DataError


def mspipe_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("mspipe")]


class Failing:
    def __init__(self, inner, name, after):
        self._inner, self._name, self._left = inner, name, after

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name != self._name:
            return found

        def failing(*given, **named):
            self._left -= 1
            if self._left < 0:
                raise ValueError("broken on purpose")
            return found(*given, **named)

        return failing


class FailingFeatures(torch.Tensor):
    """A table of features that fails after some reads."""

    def index_select(self, dim, index):
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken on purpose")
        return self.as_subclass(torch.Tensor).index_select(dim, index)


@pytest.mark.parametrize("mode", ["sync", "prefetch", "forward", "stale"])
@pytest.mark.parametrize("stage", ["sample", "memory", "write", "features", "train"])
def test_a_stage_that_raises_ends_the_run_and_says_where(toy, mode, stage):
    events = toy.stream(400)
    pipe = toy.pipeline(events, mode=mode)
    after = 4
    if stage == "sample":
        pipe.sampler = Failing(pipe.sampler, "sample", after)
    elif stage == "memory":
        pipe.memory.rows = Failing(pipe.memory.rows, "read", after)
    elif stage == "write":
        pipe.memory.rows = Failing(pipe.memory.rows, "write", after)
    elif stage == "features":
        pipe.features = pipe.features.as_subclass(FailingFeatures)
        pipe.features.left = 2 * after
    else:
        pipe.model.embed = Failing(pipe.model, "embed", after).embed
    seen = []

    def learn():
        for out in pipe.train(batches(events, 25)):
            out.loss.backward()
            seen.append(out)

    with pytest.raises(ValueError, match="broken on purpose") as caught:
        learn()
    assert any(f"stage '{stage}'" in note for note in caught.value.__notes__)
    # While one write is under way, as many as `depth` may wait for it, and training be that far ahead.
    assert len(seen) <= after + 1 + (pipe.depth if stage == "write" else 0)
    assert not mspipe_threads()
    # What is in the store is there whole.
    done = pipe.num_committed
    plain = toy.pipeline(events, mode="sync")
    if mode != "stale":
        list(plain.train(list(batches(events, 25))[:done]))
        ours = pipe.memory.rows
        ours = getattr(ours, "_inner", ours)
        assert torch.equal(ours.table, plain.memory.rows.table)
    # And the memory is free for the next run.
    pipe.memory.rows = getattr(pipe.memory.rows, "_inner", pipe.memory.rows)
    with pipe.memory.lease("a test"):
        pass


@pytest.mark.parametrize("mode", ["sync", "prefetch", "forward", "stale"])
def test_an_iterator_that_is_left_leaves_no_threads(toy, mode):
    events = toy.stream(600)
    pipe = toy.pipeline(events, mode=mode)
    run = pipe.train(batches(events, 20))
    next(run), next(run)
    run.close()
    assert not mspipe_threads()
    assert pipe.num_committed <= 2
    list(pipe.train(batches(events, 300)))


def test_two_pipelines_on_one_memory_are_refused(toy):
    events = toy.stream()
    first = toy.pipeline(events)
    second = toy.pipeline(events, memory=first.memory)
    run = first.train(batches(events, 50))
    next(run)
    with pytest.raises(ConfigError, match="a pipeline's train is at work on it"):
        next(second.train(batches(events, 50)))
    with pytest.raises(ConfigError, match="no run under way"):
        first.mode = "sync"
    run.close()
    first.mode = "sync"
    assert len(list(second.train(batches(events, 300)))) == 2


def test_memory_that_is_no_longer_finite_names_its_nodes(toy):
    events = toy.stream()
    pipe = toy.pipeline(events)
    with torch.no_grad():
        pipe.model.cell.weight_hh.fill_(float("nan"))
    with pytest.raises(DataError, match=r"expected finite numbers, got others for .* nodes"):
        list(pipe.train(batches(events, 50)))


def test_what_does_not_fit_is_refused(toy, unchecked):
    events = toy.stream()
    model, sampler = toy.models["tgn"](), Sampler(events, [4])
    memory = NodeMemory(events.num_nodes, model.dim, model.mail_dim)
    for settings_, told in (
        ({"mode": "fast"}, "mode: expected one of sync, prefetch"),
        ({"depth": 0}, "at least 1"),
        ({"mode": "stale", "max_staleness": 0}, "at least 1"),
        ({"mode": "stale", "max_staleness": -2}, "at least 1"),
        ({"max_staleness": 2}, "expected mode 'stale'"),
        ({"mode": "stale", "is_fixed": True}, "expected max_staleness with it"),
    ):
        with pytest.raises(ConfigError, match=told):
            Pipeline(model, memory, sampler, events.features, **settings_)
    with pytest.raises(ConfigError, match="expected 3 columns as the model"):
        Pipeline(model, memory, sampler)
    with pytest.raises(ConfigError, match="expected dim, mail_dim and slots"):
        Pipeline(model, NodeMemory(9, 8, 1), sampler, events.features)
    for num_nodes in (3, events.num_nodes - 1):
        small = NodeMemory(num_nodes, model.dim, model.mail_dim)
        told = rf"expected nodes below {num_nodes}.*memory.grow makes room"
        with pytest.raises(DataError, match=told):
            list(Pipeline(model, small, sampler, events.features).train(batches(events)))


def test_a_spike_is_waited_for_and_never_exceeds_the_cap(toy, monkeypatch):
    events = toy.stream(600)
    pipe = toy.pipeline(events, mode="stale", max_staleness=2)
    rows, calls, outs, passed_s = pipe.memory.rows, [0], [], [0.0]
    write, trainer, waits = rows.write, threading.current_thread(), threading.Event()

    def clock():
        # Without the sixth write training has seven iterations, and asks for the eighth in vain.
        if threading.current_thread() is trainer and len(outs) == 7:
            waits.set()
        return time.perf_counter() + passed_s[0]

    def spiky(ids, given):
        calls[0] += 1
        if calls[0] == 6:
            assert waits.wait(60)
            passed_s[0] = 1000.0
        write(ids, given)

    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=clock))
    rows.write = spiky
    outs.extend(pipe.train(batches(events, 30)))
    report = pipe.report()
    assert max(report.staleness) == 2
    assert report.waits["fetched rows"] >= 1000


@pytest.mark.parametrize("mode", ["sync", "forward"])
def test_memory_is_not_copied_or_forgotten_under_a_run(toy, tmp_path, mode):
    events = toy.stream()
    pipe = toy.pipeline(events, mode=mode)
    run = pipe.train(batches(events, 50))
    next(run), next(run)
    snapshot = {"rows": torch.empty(0), "about": torch.tensor([8, 19, 1, 0])}
    for what in (
        pipe.memory.reset,
        pipe.memory.snapshot,
        lambda: pipe.memory.save(tmp_path / "memory"),
        lambda: pipe.memory.restore(snapshot),
        lambda: pipe.memory.grow(99),
    ):
        with pytest.raises(ConfigError, match=r"expected no run under way.*a pipeline's train"):
            what()
    assert not list(tmp_path.iterdir())
    assert len(list(run)) == 10, "and the run is as it was"
    pipe.memory.save(tmp_path / "memory")


def test_the_error_is_told_where_another_stage_is_slow(toy, caplog):
    """Whoever waits for a stage longer than a second is told for which; then comes what went wrong."""
    events = toy.stream()
    pipe = toy.pipeline(events, mode="forward")
    rows = pipe.memory.rows
    read, calls = rows.read, []

    def slow(ids):
        calls.append(len(ids))
        if len(calls) == 4:
            time.sleep(1.5)
        return read(ids)

    def failing(ids, given):
        raise OSError("broken on purpose")

    rows.read, rows.write = slow, failing
    with pytest.raises(OSError, match="broken on purpose"):
        list(pipe.train(batches(events, 50)))
    assert not mspipe_threads()


def test_a_slow_write_has_the_memory_until_it_ends(toy, caplog):
    events = toy.stream()
    pipe = toy.pipeline(events, mode="forward")
    rows, begun, ended = pipe.memory.rows, threading.Event(), threading.Event()
    write = rows.write

    def slow(ids, given):
        begun.set()
        deadline = time.monotonic() + 60
        while "waiting for mspipe link out" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        write(ids, given)
        ended.set()

    rows.write = slow
    run = pipe.train(batches(events, 50))
    next(run), next(run)
    assert begun.wait(60)
    run.close()
    assert "waiting for mspipe link out" in caplog.text
    assert ended.is_set()
    assert not mspipe_threads()
    pipe.memory.reset()
    assert int(pipe.memory.read(torch.arange(events.num_nodes)).memory.count_nonzero()) == 0
