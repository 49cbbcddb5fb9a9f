"""Overlap changes no bit, staleness is what was asked for, and nothing is left behind."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

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
from shared.errors import DataError

NUM_LATE = 20  # iterations in the runs of `Late`
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


class Late(Stages):
    """Each write waits for the next iteration's fetch, which misses it therefore."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._num_fetched = 0

    def fetch_memory(self, work):
        super().fetch_memory(work)
        self._num_fetched = work.index + 1

    def write(self, work, rows):
        deadline = time.monotonic() + 60
        while self._num_fetched < min(work.index + 2, NUM_LATE):
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        super().write(work, rows)


@pytest.mark.unchecked
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
    pipe.stages = Late
    toy.train(pipe, events, epochs=1, size=20)
    report = pipe.report()
    assert report.num_rows_forwarded > 100
    assert report.num_updates_dropped == 0
    row_bytes = pipe.memory.layout.row_bytes
    assert 0 < report.ring_bytes <= 3 * 2 * 20 * row_bytes
    assert report.read_bytes == report.num_rows_read * row_bytes
    assert report.written_bytes == report.num_rows_written * row_bytes


@pytest.mark.parametrize("cap", [2, 3])
def test_staleness_never_exceeds_its_cap(toy, cap):
    events = toy.stream(600)
    pipe = slowed(toy.pipeline(events, mode="stale", max_staleness=cap, stages=Late), 3, 0.02)
    toy.train(pipe, events, epochs=1, size=30)
    report = pipe.report()
    assert 1 < max(report.staleness) <= cap
    assert 0 < report.dropped_share < 1
    assert "staleness" in str(report)


@pytest.mark.unchecked
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


@pytest.mark.unchecked
def test_mitigation_mixes_and_fits(toy):
    events = toy.stream(900, num_src=60)
    mitigation = Mitigation(events, quantile=0.5)
    pipe = slowed(
        toy.pipeline(events, mode="stale", max_staleness=4, mitigation=mitigation), 1, 0.02
    )
    read, num_read = pipe.memory.read_rows, []

    def count(nodes):
        num_read.append(len(nodes))
        return read(nodes)

    pipe.memory.read_rows = count
    toy.train(pipe, events, epochs=1, size=40)
    report = pipe.report()
    assert report.num_mixed > 0
    assert report.num_rows_read == sum(num_read), "those of similar nodes are read too"
    assert report.weight is not None
    assert 0 <= report.weight <= 1


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


@pytest.mark.unchecked
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


@pytest.mark.unchecked
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


@pytest.mark.parametrize("num_negatives", [1, 3])
def test_the_loss_is_that_of_its_definition(toy, num_negatives):
    events = toy.stream(60)
    run = toy.pipeline(events).train(batches(events, 30, num_negatives=num_negatives))
    for out in run:
        expected = -out.pos.sigmoid().log().mean() - (1 - out.neg.sigmoid()).log().mean()
        assert out.neg.shape == (30, num_negatives)
        torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("start", [None, 7.0])
def test_states_begin_with_the_stream_unless_a_start_was_given(toy, start):
    early = toy.stream(40)
    events = Events(early.src, early.dst, early.t + 1000, early.features)
    nodes = torch.arange(events.num_nodes)
    model = toy.models["tgn"]()
    memory = NodeMemory(events.num_nodes, model.dim, model.mail_dim, start=start)
    toy.pipeline(events, memory=memory)
    toy.pipeline(early, memory=memory)  # the first pipeline's stream is the memory's
    begin = events.t[0].item() if start is None else start
    assert memory.read(nodes).memory_times.eq(begin).all()
    kept = memory.snapshot()
    for own in (None, 5.0):
        other = NodeMemory(0, model.dim, model.mail_dim, start=own)
        other.restore(kept)
        assert other.start == (begin if own is None else own)
        stored = other.start if start is None else start
        assert other.read(nodes).memory_times.eq(stored).all()


def test_states_begin_with_the_first_batch_of_samplers_without_a_begin(toy):
    events = toy.stream(40)
    stream = Events(events.src, events.dst, events.t + 1000, events.features)
    sampler = SimpleNamespace(sample=Sampler(stream, [4]).sample)
    outputs = []
    for candidate in (sampler, Sampler(stream, [4])):
        pipe = toy.pipeline(stream, sampler=candidate)
        outputs.append(torch.cat([out.pos for out in pipe.score(batches(stream, 10))]))
    assert torch.equal(*outputs)


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
