"""What copies take while work runs beside them, and what becomes of errors in the thread that copies."""

import itertools
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from memo.profiler.timing.store_rate import measure_store, measure_streams
from memo.runtime.stores import FileStore, MemoryStore

MB = 1_000_000


def test_rates_are_those_of_the_store_and_slowdown_that_of_work_beside_copies(monkeypatch):
    """By a clock of each thread's own, which only copies and work move on."""
    clock, worked, num_works = threading.local(), threading.Semaphore(0), itertools.count()

    def now():
        return getattr(clock, "now_s", 0.0)

    def copy_at(rate):
        def copy(store, offset, data):
            worked.acquire(timeout=60)
            clock.now_s = now() + len(data) / rate

        return copy

    def work():
        clock.now_s = now() + (0.002 if next(num_works) < 3 else 0.003)  # three alone
        worked.release()

    monkeypatch.setattr("memo.profiler.timing.store_rate.time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(MemoryStore, "write", copy_at(200 * MB))
    monkeypatch.setattr(MemoryStore, "read", copy_at(800 * MB))
    found = measure_store(MemoryStore(), work)
    assert found.send.time_s(32 << 20) == pytest.approx((32 << 20) / (200 * MB))
    assert found.fetch.time_s(32 << 20) == pytest.approx((32 << 20) / (800 * MB))
    assert found.slowdown == pytest.approx(1.5)
    assert found.own_bytes == 0


class Copies:
    """A thread whose copies are over as soon as they begin, and which says otherwise for a while."""

    def __init__(self, answers):
        self._answers = iter(answers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function):
        function()
        return self

    def done(self):
        return next(self._answers)

    def result(self):
        return None


def test_work_that_outlasts_the_copies_is_not_counted(monkeypatch):
    """By a clock that work alone moves on: three alone, one beside copies, and one in which they end."""
    clock, seconds = [0.0], iter([5.0, 2.0, 2.0, 3.0, 90.0])

    def work():
        clock[0] += next(seconds)

    copies = Copies([False, False, False, True, True])
    monkeypatch.setattr(
        "memo.profiler.timing.store_rate.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    monkeypatch.setattr("memo.profiler.timing.store_rate.ThreadPoolExecutor", lambda *_: copies)
    assert measure_store(MemoryStore(), work).slowdown == 1.5


def test_a_latency_too_small_to_be_seen_is_no_news(monkeypatch, caplog):
    """Larger copies that take less than their share give a negative one."""
    clock = [0.0]

    def copy(store, offset, data):
        clock[0] += 1e-9 * len(data) ** 1.1

    monkeypatch.setattr(
        "memo.profiler.timing.store_rate.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    monkeypatch.setattr(MemoryStore, "write", copy)
    monkeypatch.setattr(MemoryStore, "read", copy)
    monkeypatch.setattr(
        "memo.profiler.timing.store_rate.ThreadPoolExecutor", lambda *_: Copies([True])
    )
    found = measure_store(MemoryStore(), lambda: None)
    assert found.send.time_s(0) == 0
    assert caplog.text == ""


class ClockedStreams:
    """Queues by a clock: copies take their bytes over a rate; an event is a queue's time."""

    def __init__(self):
        self.rates = {"out": 50e9, "back": 40e9}
        self.now_s = dict.fromkeys(("compute", "out", "back"), 0.0)
        self.copied_bytes = 0

    def record(self, queue):
        return self.now_s[queue]

    def wait(self, queue, event):
        self.now_s[queue] = max(self.now_s[queue], event)

    def copy(self, queue, target, source):
        assert target.shape == source.shape
        self.now_s[queue] += len(target) / self.rates[queue]
        self.copied_bytes += len(target)

    def seconds(self, begin, end):
        return end - begin

    def synchronize(self):
        self.now_s = dict.fromkeys(self.now_s, max(self.now_s.values()))


def test_rates_of_streams_are_those_of_copies_beside_work(monkeypatch):
    """Copies of a GPU are over long before a layer is: they go on for as long as it is measured."""
    streams, num_works = ClockedStreams(), itertools.count()

    def work():
        is_alone = next(num_works) < 3
        streams.now_s["compute"] += 0.10 if is_alone else 0.12
        if not is_alone:
            assert streams.now_s["back"] > streams.now_s["compute"], "copies run beside it"

    clock = SimpleNamespace(perf_counter=lambda: max(streams.now_s.values()))
    monkeypatch.setattr("memo.profiler.timing.store_rate.time", clock)
    found = measure_streams(
        MemoryStore(), work, streams, torch.empty(16 << 20, dtype=torch.uint8), limit_bytes=20 << 20
    )
    assert found.send.time_s(64 << 20) == pytest.approx((64 << 20) / 50e9)
    assert found.fetch.time_s(64 << 20) == pytest.approx((64 << 20) / 40e9)
    assert found.slowdown == pytest.approx(1.2)
    assert streams.copied_bytes > 0.4 * 20e9


def test_a_files_own_memory_is_told(tmp_path):
    with closing(FileStore(tmp_path)) as store:
        found = measure_store(store, lambda: None)
    assert found.own_bytes == 1 << 20, "direct I/O copies through memory that begins at a page"


def test_no_more_is_stored_than_the_limit(monkeypatch):
    sizes, write = set(), MemoryStore.write

    def note(store, offset, data):
        sizes.add(len(data))
        write(store, offset, data)

    monkeypatch.setattr(MemoryStore, "write", note)
    measure_store(MemoryStore(), lambda: None, limit_bytes=5 << 20)
    assert sizes == {1 << 20, 4 << 20}
    sizes.clear()
    found = measure_store(MemoryStore(), lambda: None, limit_bytes=100)
    assert sizes == {4096}
    assert found.send.time_s(1 << 20) > 0
