"""Caches against the plain store and simple models of each policy."""

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore
from shared.errors import ConfigError, DataError

POLICIES = ["lru", "keep", "lfu"]


def rows_of(count, dim=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=draw, dtype=torch.float32)


def once(ids):
    return list(dict.fromkeys(ids))


class Model:
    """What is held; a policy says which ids enter and which leave.

    `wanted` and `limit` are what the cache has found out about how many rows pay to be kept, and to
    be restored.
    """

    def __init__(self):
        self.held, self.wanted, self.limit = [], 0, 0

    def fetch(self, ids, capacity):
        hits = [i for i in once(ids) if i in self.held]
        self.access(once(ids), capacity)
        return len(hits)

    def restore(self, ids, capacity):
        ids = once(ids)[:capacity][::-1]
        missing = [i for i in ids if i not in self.held]
        skipped = missing[: max(0, len(missing) - self.limit)]
        self.access([i for i in ids if i not in skipped], capacity)


class Queue(Model):
    """LRU, and what is kept beside it: ids in the order in which they leave."""

    def __init__(self):
        super().__init__()
        self.queue, self.kept = [], []

    def access(self, batch, capacity):
        missed = [i for i in batch if i not in self.held]
        entering = [i for i in batch if i not in self.kept]
        self.queue = [i for i in self.queue if i not in entering] + entering
        excess = len(self.queue) + len(self.kept) - capacity
        while excess > 0:
            if len(self.kept) > self.wanted:
                self.kept.pop(0)
            elif self.queue[0] not in missed and len(self.kept) < self.wanted:
                self.kept.append(self.queue.pop(0))
                continue
            else:
                self.queue.pop(0)
            excess -= 1
        self.held = self.queue + self.kept


class Counts(Model):
    """LFU: a count and the time of the last use for each id."""

    def __init__(self):
        super().__init__()
        self.keys, self.time = {}, 0

    def access(self, batch, capacity):
        misses = []
        for at in batch:
            self.time += 1
            if at in self.keys:
                self.keys[at] = (self.keys[at][0] + 1, self.time)
            else:
                misses.append((at, (1, self.time)))
        misses = misses[max(0, len(misses) - capacity) :]
        leaving = len(self.keys) + len(misses) - capacity
        for at in sorted(self.keys, key=self.keys.get)[: max(0, leaving)]:
            del self.keys[at]
        self.keys.update(misses)
        self.held = list(self.keys)


def model_of(policy):
    return {"lru": Queue, "keep": Queue, "lfu": Counts}[policy]()


def num_wanted(cache):
    return cache.stats()["edge"].num_wanted


def num_restorable(cache):
    return cache.stats()["edge"].max_restored


class Traced(FeatureStore):
    """Counts the rows asked for, and fails on demand."""

    is_broken = False
    asked = num_calls = 0

    def gather(self, kind, ids, out=None):
        if self.is_broken:
            raise OSError("no answer")
        self.asked, self.num_calls = self.asked + len(ids), self.num_calls + 1
        assert len(set(ids.tolist())) == len(ids), "each miss is fetched once"
        return super().gather(kind, ids, out)


STEP = st.tuples(
    st.sampled_from(["fetch"] * 8 + ["append", "restore", "clear", "break"]),
    st.lists(st.integers(0, 2**20), max_size=14),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    fraction=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]),
    num_rows=st.integers(0, 30),
    spread=st.sampled_from([6, 25, 2**20]),
    steps=st.lists(STEP, max_size=40),
)
def test_rows_and_what_is_held_follow_the_model(policy, fraction, num_rows, spread, steps):
    known = rows_of(num_rows)
    store = Traced(edge=known)
    cache = FeatureCache(store, edge=fraction, policy=policy)
    model = model_of(policy)
    hits = misses = 0
    for name, numbers in steps:
        capacity, model.wanted = round(fraction * len(known)), num_wanted(cache)
        ids = [number % min(len(known), spread) for number in numbers] if len(known) else []
        wanted = torch.tensor(ids, dtype=torch.int64)
        if name == "append":
            new = rows_of(len(numbers), seed=len(known))
            store.append("edge", new)
            known = torch.cat([known, new])
        elif name == "clear":
            cache.clear()
            model = model_of(policy)
        elif name == "break":
            store.is_broken = True
            if set(ids) - set(cache.held("edge").tolist()):
                with pytest.raises(OSError, match="no answer"):
                    cache.fetch("edge", wanted)
            store.is_broken = False
            cache.clear()
            model = model_of(policy)
        elif name == "restore":
            cache.restore(wanted)
            model.limit = num_restorable(cache)
            model.restore(ids, capacity)
        else:
            asked = store.asked
            assert torch.equal(cache.fetch("edge", wanted), known[wanted])
            hit = model.fetch(ids, capacity)
            assert store.asked - asked == len(set(ids)) - hit
            hits, misses = hits + hit, misses + len(set(ids)) - hit
        assert cache.held("edge").tolist() == sorted(model.held)
    stats = cache.stats()["edge"]
    assert (stats.hits, stats.misses) == (hits, misses)
    assert stats.num_slots == round(fraction * len(known))
    assert stats.bytes_from_store == store.asked * 3 * 4
    held = cache.held("edge")
    assert torch.equal(cache.fetch("edge", held), known[held]), "none was overwritten"


def zipf(num_ids, size, draw):
    return torch.from_numpy((draw.zipf(1.3, size) * 7919) % num_ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_long_runs_follow_the_model(policy):
    draw = np.random.default_rng(1)
    known = rows_of(2000)
    cache = FeatureCache(FeatureStore(edge=known), edge=0.05, policy=policy)
    model = model_of(policy)
    hits = 0
    for at in range(150):
        ids = zipf(2000, 250 if at % 9 == 0 else 30, draw)
        model.wanted = num_wanted(cache)
        if at % 7 == 3:
            cache.restore(ids)
            model.limit = num_restorable(cache)
            model.restore(ids.tolist(), 100)
        assert torch.equal(cache.fetch("edge", ids), known[ids])
        hits += model.fetch(ids.tolist(), 100)
        assert cache.held("edge").tolist() == sorted(model.held)
    assert cache.stats()["edge"].hits == hits > 500


@given(accesses=st.lists(st.integers(0, 19), max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_lru_leaves_what_one_access_at_a_time_leaves(accesses, cuts):
    cache = FeatureCache(FeatureStore(node=rows_of(20)), node=0.3, policy="lru")
    textbook = OrderedDict()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(accesses)), len(accesses)]
    for first, end in pairwise(bounds):
        batch = once(accesses[first:end])
        cache.fetch("node", torch.tensor(batch, dtype=torch.int64))
        for at in batch:
            textbook[at] = None
            textbook.move_to_end(at)
            if len(textbook) > 6:
                textbook.popitem(last=False)
    assert cache.held("node").tolist() == sorted(textbook)


def test_ids_of_a_batch_count_once():
    cache = FeatureCache(FeatureStore(node=rows_of(10)), node=0.5)
    cache.fetch("node", torch.tensor([3, 3, 4, 3]))
    cache.fetch("node", torch.tensor([4, 4, 5]))
    stats = cache.stats()["node"]
    assert (stats.hits, stats.misses, stats.num_slots) == (1, 3, 5)
    assert stats.hit_ratio == 0.25
    assert stats.bytes_from_store == 3 * 3 * 4
    with pytest.raises(FrozenInstanceError):
        stats.hits = 7  # pyrefly: ignore [read-only]
    cache.reset_stats()
    stats = cache.stats()["node"]
    assert (stats.hits, stats.misses, stats.bytes_from_store, stats.hit_ratio) == (0, 0, 0, 0.0)
    assert cache.held("node").tolist() == [3, 4, 5], "only the counts begin again"


def test_the_node_cache_lives_on_across_rounds_and_restoring_edges():
    store = FeatureStore(node=rows_of(20), edge=rows_of(100))
    cache = FeatureCache(store, node=0.5, edge=0.1)
    nodes = torch.arange(10)
    for _ in range(3):
        cache.restore(torch.arange(100))
        cache.fetch("edge", torch.arange(100))
        cache.fetch("node", nodes)
    stats = cache.stats()
    assert (stats["node"].misses, stats["node"].hits) == (10, 20)
    assert stats["edge"].hits == 30, "the first ten of each round"


def test_restored_edges_stay_until_they_are_visited():
    """A round in the order of the edges hits all that were restored; without it, none."""
    store = FeatureStore(edge=rows_of(100))
    for policy in POLICIES:
        hits = {}
        for is_restored in (False, True):
            cache = FeatureCache(store, edge=0.4, policy=policy)
            for _ in range(3):
                if is_restored:
                    cache.restore(torch.arange(100))
                cache.reset_stats()
                for batch in torch.arange(100).split(5):
                    cache.fetch("edge", batch)
            hits[is_restored] = cache.stats()["edge"].hits
        assert hits[True] >= 20
        assert hits[True] > hits[False]


def test_rows_already_held_are_not_restored_again():
    store = Traced(edge=rows_of(100))
    cache = FeatureCache(store, edge=0.1)
    cache.fetch("edge", torch.arange(10))
    cache.restore(torch.tensor([4, 4, 3, 70, 71]))
    assert store.asked == 12
    assert set(cache.held("edge").tolist()) == {2, 3, 4, 5, 6, 7, 8, 9, 70, 71}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_batch_changes_nothing(policy):
    cache = FeatureCache(FeatureStore(edge=rows_of(10)), edge=0.4, policy=policy)
    cache.fetch("edge", torch.arange(3))
    before = cache.stats(), cache.held("edge").tolist()
    for ids in ([0, 10], [-1, 2]):
        with pytest.raises(DataError, match=r"edge ids in \[0, 10\)"):
            cache.fetch("edge", torch.tensor(ids))
        with pytest.raises(DataError, match=r"edge ids in \[0, 10\)"):
            cache.restore(torch.tensor(ids))
    with pytest.raises(DataError, match="there are none"):
        cache.fetch("node", torch.tensor([0]))
    assert (cache.stats(), cache.held("edge").tolist()) == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", ["fetch", "restore"])
def test_rows_that_did_not_arrive_are_not_taken_for_held(policy, call, monkeypatch):
    known = rows_of(30)
    store = Traced(edge=known)
    cache = FeatureCache(store, edge=0.4, policy=policy)
    ids = torch.arange(5, 25)
    calls = {
        "fetch": lambda: cache.fetch("edge", ids),
        "restore": lambda: cache.restore(ids),
    }
    for fails_late in (False, True):
        cache.fetch("edge", torch.arange(12))
        with monkeypatch.context() as patch:
            if fails_late:
                patch.setattr(torch.Tensor, "index_copy_", lambda *_: 1 / 0)
            store.is_broken = not fails_late
            with suppress(OSError, ZeroDivisionError):
                calls[call]()
            store.is_broken = False
        every = torch.arange(30)
        assert torch.equal(cache.fetch("edge", every), known)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_store_is_asked_once_a_call_even_for_nothing(policy):
    store = Traced(edge=rows_of(30))
    cache = FeatureCache(store, edge=1.0, policy=policy)
    ids = torch.arange(30)
    for num_calls in range(1, 4):
        cache.fetch("edge", ids[: 10 * num_calls - 10])
        assert store.num_calls == num_calls
    cache.restore(ids[:0])
    assert store.num_calls == 4


def test_the_cache_grows_with_the_store():
    store = FeatureStore()
    cache = FeatureCache(store, edge=0.25)
    assert cache.stats() == {}
    known = torch.empty(0, 8)
    for seed in range(60):
        new = rows_of(13, 8, seed)
        store.append("edge", new)
        known = torch.cat([known, new])
        ids = torch.arange(len(known))[-20:]
        assert torch.equal(cache.fetch("edge", ids), known[ids])
        stats = cache.stats()["edge"]
        assert stats.num_slots == round(len(known) / 4)
        assert stats.bytes_on_device <= (stats.num_slots * 9 / 8 + 1 + 30) * 32
    assert len(cache.held("edge")) == stats.num_slots
    assert not cache.stats().get("node")


def test_inference_mode_and_other_types_by_default_leave_usable_rows():
    known = rows_of(50)
    with torch.inference_mode():
        store = FeatureStore(edge=known)
        cache = FeatureCache(store, edge=0.2)
        cache.fetch("edge", torch.arange(20))
        store.append("edge", rows_of(5, seed=1))
    torch.set_default_dtype(torch.float64)
    try:
        store.append("edge", rows_of(2, seed=2))
        known = torch.cat([known, rows_of(5, seed=1), rows_of(2, seed=2)])
        rows = cache.fetch("edge", torch.arange(10, 57))
    finally:
        torch.set_default_dtype(torch.float32)
    assert rows.dtype == torch.float32
    assert not rows.is_inference()
    assert torch.equal(rows, known[10:])
    assert torch.equal(cache.fetch("edge", cache.held("edge")), known[cache.held("edge")])


class Endless:
    """Rows made of their ids, more than any map over all ids could hold."""

    def dim(self, kind):
        return 2 if kind == "node" else 0

    def num_rows(self, kind):
        return 2**40 if kind == "node" else 0

    def gather(self, kind, ids, out=None):
        rows = torch.stack([ids % 1009, ids % 9973], 1).float()
        return rows if out is None else out.copy_(rows)


@pytest.mark.parametrize("stride", [1, 2**20, 2**32, 7919])
def test_maps_are_sized_by_what_is_held(stride):
    store = Endless()
    cache = FeatureCache(store, node=100 / 2**40)
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(0, 200, (60,), generator=draw) * stride
        assert torch.equal(cache.fetch("node", ids), store.gather("node", ids))
    stats = cache.stats()["node"]
    assert (stats.num_slots, len(cache.held("node"))) == (100, 100)
    assert stats.bytes_on_device < 2000
    assert stats.hits > 500


def test_threads_fetch_at_once():
    known = {"node": rows_of(200), "edge": rows_of(300, 5)}
    cache = FeatureCache(FeatureStore(**known), node=0.2, edge=0.2, policy="lfu")
    wrong = []

    def fetch(seed):
        draw = torch.Generator().manual_seed(seed)
        for at in range(150):
            kind = ("node", "edge")[at % 2]
            ids = torch.randint(0, 200, (40,), generator=draw)
            if not torch.equal(cache.fetch(kind, ids), known[kind][ids]):
                wrong.append((seed, at))

    threads = [threading.Thread(target=fetch, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ConfigError, match="edge as a fraction"):
        FeatureCache(FeatureStore(), edge=fraction)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("fifo", "expected one of keep, lru, lfu, got 'fifo'; use 'lru'"),
        ("static", "expected one of keep, lru, lfu, got 'static'; use 'keep'"),
        ("lro", "expected one of keep, lru, lfu, got 'lro'; did you mean 'lru'"),
    ],
)
def test_a_policy_that_is_not_there_is_refused_with_what_to_use(policy, told):
    with pytest.raises(ConfigError, match=told):
        FeatureCache(FeatureStore(node=rows_of(10)), policy=policy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match=r"'cuda'.*use 'cpu'"):
        FeatureCache(FeatureStore(), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_on_a_gpu_holds_the_same_rows(policy):
    draw = np.random.default_rng(1)
    known = rows_of(2000, 64)
    store = FeatureStore(node=known)
    caches = [
        FeatureCache(store, node=0.05, policy=policy, device=name) for name in ("cpu", "cuda")
    ]
    for at in range(100):
        ids = zipf(2000, 250 if at % 9 == 0 else 30, draw)
        rows = [cache.fetch("node", ids) for cache in caches]
        assert rows[1].is_cuda
        assert torch.equal(rows[0], rows[1].cpu())
        assert torch.equal(caches[0].held("node"), caches[1].held("node"))


def test_nothing_is_fetched_from_a_store_that_got_its_first_rows():
    store = FeatureStore()
    cache = FeatureCache(store, node=0, edge=0.2)
    store.append("edge", torch.ones(2, 5))
    assert cache.fetch("edge", torch.empty(0, dtype=torch.int64)).shape == (0, 5)
    assert cache.fetch("edge", torch.tensor([1])).tolist() == [[1] * 5]
