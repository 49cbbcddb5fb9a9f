"""A cache changes what travels, and nothing that is read."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_cache import NodeRowCache
from mspipe.memory.rows import LocalRows
from shared.errors import ConfigError

CPU = torch.device("cpu")
FRESH = torch.tensor([0.0, -1.0, 0.5])
ids_of = st.lists(st.integers(0, 19), max_size=12)
steps_of = st.lists(
    st.one_of(
        st.tuples(st.just("read"), ids_of),
        st.tuples(st.just("write"), ids_of),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("grow"), st.integers(0, 30)),
    ),
    max_size=30,
)


class Counting(LocalRows):
    """Rows that know what was asked of them."""

    def __init__(self, num_rows):
        super().__init__(num_rows, FRESH, CPU)
        self.asked = []

    def read(self, ids):
        self.asked += ids.tolist()
        return super().read(ids)


@given(steps=steps_of, num_kept=st.integers(1, 25))
def test_reads_are_those_of_the_rows_behind(steps, num_kept):
    plain, cached = LocalRows(20, FRESH, CPU), NodeRowCache(LocalRows(20, FRESH, CPU), 3, num_kept)
    for number, (what, given_) in enumerate(steps):
        if what == "read":
            ids = torch.tensor(given_, dtype=torch.int64)
            assert torch.equal(cached.read(ids), plain.read(ids))
        elif what == "write":
            ids = torch.tensor(given_, dtype=torch.int64).unique()
            rows = torch.full((len(ids), 3), float(number)) + ids[:, None]
            cached.write(ids, rows)
            plain.write(ids, rows)
        elif what == "reset":
            cached.reset()
            plain.reset()
        elif given_ > plain.num_rows:
            cached.grow(given_)
            plain.grow(given_)
    every = torch.arange(plain.num_rows)
    assert torch.equal(cached.read(every), plain.read(every))
    assert cached.num_found <= cached.num_asked


def test_the_least_recently_used_leave():
    behind = Counting(20)
    cached = NodeRowCache(behind, 3, 4)
    for ids in ([0, 1], [2, 3], [0], [4], [0, 2, 3, 4], [1], [2], [5, 5, 5]):
        cached.read(torch.tensor(ids))
    # 1 was the oldest when 4 came; when 1 came, 0 (used with the others at once, first among them) or
    # another of the four had to leave, and the three that stayed needed no second way.
    assert behind.asked[:5] == [0, 1, 2, 3, 4]
    assert behind.asked[5] == 1
    assert behind.asked[-1] == 5
    assert len(behind.asked) <= 8
    assert cached.num_asked == 15
    cached.write(torch.tensor([7]), torch.ones(1, 3))
    before = len(behind.asked)
    assert torch.equal(cached.read(torch.tensor([7])), torch.ones(1, 3))
    assert len(behind.asked) == before, "what was written is here"


@pytest.mark.parametrize("begins", ["before", "during"])
def test_a_read_that_a_write_overtakes_is_not_kept(begins):
    """The row travels, is written meanwhile and pushed out again: the one that arrives is an old one."""
    behind, waits, goes = LocalRows(20, FRESH, CPU), threading.Event(), threading.Event()
    cached = NodeRowCache(behind, 3, 1)
    read, write = behind.read, behind.write

    def slow_read(ids):
        found = read(ids)
        waits.set()
        assert goes.wait(60)
        return found

    def other():
        assert waits.wait(60)
        behind.read = read
        cached.write(torch.tensor([3]), torch.ones(1, 3))
        cached.write(torch.tensor([9]), torch.ones(1, 3))  # 3 has to leave
        goes.set()

    def slow_write(ids, rows):
        if 3 in ids.tolist():
            reader.start()
            assert waits.wait(60)
        write(ids, rows)

    behind.read = slow_read
    if begins == "before":
        writer = threading.Thread(target=other)
        writer.start()
        cached.read(torch.tensor([3]))
        writer.join()
    else:
        reader = threading.Thread(target=lambda: cached.read(torch.tensor([3])))
        behind.write = slow_write
        cached.write(torch.tensor([3]), torch.ones(1, 3))
        behind.read = read
        cached.write(torch.tensor([9]), torch.ones(1, 3))
        goes.set()
        reader.join()
    assert torch.equal(cached.read(torch.tensor([3])), torch.ones(1, 3))


@pytest.mark.unchecked
def test_training_through_a_cache_is_the_same(toy):
    events = toy.stream()
    plain = toy.pipeline(events, mode="sync")
    expected = toy.train(plain, events)
    for settings_ in ({"mode": "sync"}, {"mode": "forward"}, {"mode": "prefetch"}):
        model = toy.models["tgn"]()
        memory = NodeMemory(
            events.num_nodes,
            model.dim,
            model.mail_dim,
            cache_bytes=9 * plain.memory.layout.row_bytes,
        )
        pipe = toy.pipeline(events, memory=memory, **settings_)
        assert toy.train(pipe, events) == expected
        every = torch.arange(events.num_nodes)
        assert torch.equal(memory.read_rows(every), plain.memory.read_rows(every))
        found = memory.cache.num_found
        assert found < memory.cache.num_asked
        # Where rows are forwarded, those that are left to read may all be rows that no one has read.
        assert found > 0 or settings_["mode"] == "forward"


def test_a_cache_without_room_is_refused():
    with pytest.raises(ConfigError, match="room for a row"):
        NodeMemory(10, 8, 16, cache_bytes=5)
    with pytest.raises(ConfigError, match="cache_bytes of at least 0"):
        NodeMemory(10, 8, 16, cache_bytes=-1)
    assert NodeMemory(10, 8, 16).cache is None
