"""Overlap changes no bit, staleness is what was asked for, and nothing is left behind."""

import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mspipe import models
from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.sampler import Sampler
from mspipe.memory.node_memory import NodeMemory
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.pipeline import Pipeline
from mspipe.pipeline.stages import Stages
from mspipe.planner import plan
from shared.errors import ConfigError, DataError

EXACT = [
    {"mode": "prefetch"},
    {"mode": "prefetch", "is_early": False},
    {"mode": "forward"},
    {"mode": "forward", "depth": 1},
    {"mode": "forward", "depth": 5, "is_early": False},
    {"mode": "stale", "max_staleness": 1},
]


class Slow:
    """Something whose calls take a while, drawn anew each time."""

    def __init__(self, inner, names, seed, most_s=0.004):
        self._inner, self._names, self._most_s = inner, names, most_s
        self._draw = torch.Generator().manual_seed(seed)

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def slow(*given, **named):
            time.sleep(self._most_s * float(torch.rand((), generator=self._draw)))
            return found(*given, **named)

        return slow


def slowed(pipe, seed, most_s=0.004):
    pipe.sampler = Slow(pipe.sampler, ["sample"], seed, most_s)
    pipe.memory.rows = Slow(pipe.memory.rows, ["read", "write"], seed + 1, most_s)
    return pipe


@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
def test_modes_that_are_exact_equal_sync_bit_for_bit(toy, name):
    events = toy.stream()
    plain = toy.pipeline(events, name, mode="sync")
    expected = toy.train(plain, events)
    rows = plain.memory.snapshot()["rows"]
    assert len(set(expected)) == len(expected) == 24
    for number, how in enumerate(EXACT):
        pipe = slowed(toy.pipeline(events, name, **how), number)
        assert toy.train(pipe, events) == expected, how
        assert torch.equal(pipe.memory.snapshot()["rows"], rows), how
        for one, other in zip(pipe.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, other), how
        assert set(pipe.report().histogram) == {1}, how


@settings(max_examples=10, deadline=None)
@given(
    count=st.integers(1, 60),
    num_src=st.integers(1, 6),
    size=st.integers(1, 25),
    depth=st.integers(1, 4),
    seed=st.integers(0, 999),
    name=st.sampled_from(["tgn", "jodie", "apan"]),
    num_negatives=st.integers(0, 2),
)
def test_forwarding_is_exact_for_any_stream(
    toy, count, num_src, size, depth, seed, name, num_negatives
):
    """Nodes twice in a batch, as source and destination, meeting themselves; batches of one."""
    events = toy.stream(count, num_src, 4, seed, loops=True)
    if len(set(events.dst.tolist())) < 2:
        num_negatives = 0
    found = []
    for mode in ("sync", "forward"):
        pipe = toy.pipeline(
            events, name, mode=mode, **({"depth": depth} if mode == "forward" else {})
        )
        if mode == "forward":
            slowed(pipe, seed, 0.001)
        outs = list(pipe.train(batches(events, size, num_negatives=num_negatives)))
        found.append([torch.cat([o.pos.detach(), o.neg.detach().flatten()]) for o in outs])
        found.append(pipe.memory.snapshot()["rows"])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert torch.equal(found[1], found[3])


def test_rows_are_forwarded_where_the_store_lags(toy):
    events = toy.stream(400)
    pipe = toy.pipeline(events, mode="forward", depth=3)
    pipe.memory.rows = Slow(pipe.memory.rows, ["write"], 0, 0.05)
    toy.train(pipe, events, epochs=1, size=20)
    report = pipe.report()
    assert report.num_rows_forwarded > 100
    row_bytes = pipe.memory.layout.row_bytes
    assert 0 < report.ring_bytes <= 3 * 2 * 20 * row_bytes
    assert report.read_bytes == report.num_rows_read * row_bytes
    assert report.written_bytes == report.num_rows_written * row_bytes


@pytest.mark.parametrize("cap", [2, 3])
def test_staleness_never_exceeds_its_cap(toy, cap):
    events = toy.stream(600)
    pipe = slowed(toy.pipeline(events, mode="stale", max_staleness=cap), 3, 0.02)
    toy.train(pipe, events, epochs=1, size=30)
    report = pipe.report()
    assert 1 < max(report.staleness) <= cap
    assert 0 < report.dropped_share < 1
    assert "staleness" in str(report)


@pytest.mark.parametrize("staleness", [1, 2, 4, 7])
def test_fixed_staleness_is_the_same_in_every_run(toy, staleness):
    """Equal to one stage after another with each write held back until staleness - 1 more were made."""
    events = toy.stream(600)
    late = toy.pipeline(events, mode="sync")
    store, waiting = late.memory.rows.write, []

    def hold(ids, rows):
        waiting.append((ids, rows.clone()))
        if len(waiting) == staleness:
            store(*waiting.pop(0))

    late.memory.rows.write = hold
    expected = toy.train(late, events, epochs=1, size=30)
    for seed in (0, 1):
        how = {"mode": "stale", "max_staleness": staleness, "is_fixed": True}
        pipe = slowed(toy.pipeline(events, **how), seed)
        assert toy.train(pipe, events, epochs=1, size=30) == expected
        assert max(pipe.report().staleness) == staleness


def test_a_stale_row_is_what_an_earlier_iteration_left(toy):
    """Each read row equals the sync run's store after some iteration, no older than the cap."""
    events = toy.stream(300)
    versions = []
    memory = NodeMemory(events.num_nodes, 8, toy.models["tgn"]().mail_dim)
    pipe = slowed(toy.pipeline(events, memory=memory, mode="stale", max_staleness=3), 5, 0.01)
    write, every = memory.write_rows, torch.arange(events.num_nodes)

    def kept(nodes, rows):
        write(nodes, rows)
        versions.append(memory.read_rows(every))

    memory.write_rows = kept
    seen = []

    class Watched(Stages):
        def fetch_memory(self, work):
            super().fetch_memory(work)
            seen.append(work)

    pipe.stages = Watched
    fresh = memory.read_rows(every)
    list(pipe.train(batches(events, 25)))
    assert len(seen) == 12
    for work in seen:
        # Others may write while rows are read, but never one that this iteration was to wait for.
        least = work.num_committed
        stored = [fresh, *versions][least:]
        rows = work.rows
        for place, node in enumerate(work.sampled.nodes.tolist()):
            assert any(torch.equal(rows[place], one[node]) for one in stored)
        assert work.index - least + 1 <= 3


def test_mitigation_mixes_and_fits(toy):
    events = toy.stream(900, num_src=60)
    mitigation = Mitigation(events, quantile=0.5)
    pipe = slowed(
        toy.pipeline(events, mode="stale", max_staleness=4, mitigation=mitigation), 1, 0.02
    )
    toy.train(pipe, events, epochs=1, size=40)
    report = pipe.report()
    assert report.num_mixed > 0
    assert report.weight is not None
    assert 0 <= report.weight <= 1


# What goes wrong ----------------------------------------------------------------------------------


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
    begin = time.monotonic()
    seen = []

    def learn():
        for out in pipe.train(batches(events, 25)):
            out.loss.backward()
            seen.append(out)

    with pytest.raises(ValueError, match="broken on purpose") as caught:
        learn()
    assert time.monotonic() - begin < 5
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
    begin = time.monotonic()
    run.close()
    assert time.monotonic() - begin < 1
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
    small = NodeMemory(3, model.dim, model.mail_dim)
    with pytest.raises(DataError, match=r"expected nodes below 3.*memory.grow makes room"):
        list(Pipeline(model, small, sampler, events.features).train(batches(events)))


def test_a_spike_is_waited_for_and_never_exceeds_the_cap(toy):
    events = toy.stream(600)
    pipe = toy.pipeline(events, mode="stale", max_staleness=2)
    rows, calls = pipe.memory.rows, [0]
    write = rows.write

    def spiky(ids, given):
        calls[0] += 1
        time.sleep(0.3 if calls[0] == 6 else 0.002)
        write(ids, given)

    rows.write = spiky
    list(pipe.train(batches(events, 30)))
    report = pipe.report()
    assert max(report.staleness) == 2
    assert report.waits["fetched rows"] + report.waits["room to write"] > 0.1


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


def test_batches_without_events_or_without_negatives(toy):
    events = toy.stream(60)
    batches_of = list(batches(events, 20))
    empty = replace(batches_of[1], events=events[:0], negatives=batches_of[1].negatives[:0])
    for mode in ("sync", "forward"):
        pipe = toy.pipeline(events, mode=mode)
        with pytest.raises(DataError, match="batch 1: expected at least one event, got none"):
            list(pipe.train([batches_of[0], empty]))
        out = list(toy.pipeline(events, mode=mode).train(batches(events, 20, num_negatives=0)))
        assert [tuple(one.neg.shape) for one in out] == [(20, 0)] * 3
        assert all(one.loss > 0 for one in out)


@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
def test_events_without_features(toy, name):
    plain = toy.stream()
    events = Events(plain.src, plain.dst, plain.t)
    kind = {"tgn": models.TGN, "jodie": models.JODIE, "apan": models.APAN}[name]
    losses = []
    for mode in ("sync", "forward"):
        torch.manual_seed(0)
        model = kind(8)
        memory = NodeMemory(events.num_nodes, 8, model.mail_dim, model.slots)
        pipe = Pipeline(model, memory, Sampler(events, [model.fanout]), mode=mode)
        losses.append(toy.train(pipe, events))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_no_clock_that_may_go_back_is_read(toy, monkeypatch):
    events = toy.stream()
    expected = toy.train(toy.pipeline(events, mode="sync"), events, epochs=1)

    def backwards():
        raise AssertionError("the time of day was asked for")

    monkeypatch.setattr(time, "time", backwards)
    for how in EXACT[1::2]:
        assert toy.train(toy.pipeline(events, **how), events, epochs=1) == expected


def test_a_forked_child_trains(toy):
    """Threads do not survive a fork: a child starts its own, whatever ran before."""
    events = toy.stream()
    run = toy.pipeline(events, mode="forward").train(batches(events, 50))
    next(run)
    child = os.fork()
    if not child:
        try:
            losses = toy.train(toy.pipeline(events, mode="forward"), events)
            os._exit(0 if len(losses) == 24 else 3)
        except BaseException:  # noqa: BLE001, whatever it is, the parent's tests must not go on here
            os._exit(4)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done[1] == 0
    run.close()


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
    rows, ends = pipe.memory.rows, []
    write = rows.write

    def slow(ids, given):
        time.sleep(1.3)
        write(ids, given)
        ends.append(time.monotonic())

    rows.write = slow
    run = pipe.train(batches(events, 50))
    next(run), next(run)
    run.close()
    closed = time.monotonic()
    assert "waiting for mspipe link out" in caplog.text
    pipe.memory.reset()
    time.sleep(0.1)
    assert not ends or max(ends) < closed
    assert int(pipe.memory.read(torch.arange(events.num_nodes)).memory.count_nonzero()) == 0


def test_the_callers_gradient_mode_is_its_own(toy):
    events = toy.stream()
    pipe = toy.pipeline(events)
    run = pipe.score(batches(events, 50))
    assert not next(run).loss.requires_grad
    assert torch.is_grad_enabled()
    run.close()
    with torch.no_grad():
        assert next(pipe.train(batches(events, 50))).loss.requires_grad
    assert torch.is_grad_enabled()


def test_no_batches_are_a_run(toy):
    events = toy.stream(10)
    for mode in ("sync", "forward"):
        pipe = toy.pipeline(events, mode=mode)
        assert list(pipe.train([])) == []
        assert pipe.report().num_iterations == 0
        assert "0 iterations" in str(pipe.report())


def test_the_report_plans_from_what_it_measured(toy, tmp_path):
    events = toy.stream()
    pipe = toy.pipeline(events)
    toy.train(pipe, events, epochs=1)
    report = pipe.report()
    assert report.num_iterations == 12
    assert report.plan == plan(report.stage_s)
    assert all(seconds > 0 for seconds in report.stage_s)
    list(pipe.score(batches(events, 100)))
    assert pipe.report() is report
    report.trace(tmp_path / "deep" / "trace.json")
    assert '"ph": "X"' in (tmp_path / "deep" / "trace.json").read_text()
