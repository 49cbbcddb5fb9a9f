"""Rows against a dictionary of them."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mspipe.memory.node_memory import NodeMemory, latest
from mspipe.memory.row_layout import NO_MAIL, RowLayout, State
from mspipe.memory.server import MemoryServer
from mspipe.models.base import newest_mail
from shared.errors import ConfigError, DataError


@pytest.fixture
def shared_place():
    name = f"test-{os.getpid()}"
    yield f"shm:{name}"
    path = f"/dev/shm/mspipe-{name}"
    if os.path.exists(path):
        os.unlink(path)


@pytest.fixture(params=["cpu", "shm"])
def place(request):
    return "cpu" if request.param == "cpu" else request.getfixturevalue("shared_place")


@pytest.fixture
def server_place():
    with MemoryServer() as server:
        yield server.address


def random_state(count, layout, seed=0):
    draw = torch.Generator().manual_seed(seed)
    slots = () if layout.slots == 1 else (layout.slots,)
    return State(
        torch.randn(count, layout.dim, generator=draw),
        torch.rand(count, generator=draw, dtype=torch.float64) * 1e9,
        torch.randn(count, *slots, layout.mail_dim, generator=draw),
        torch.rand(count, *slots, generator=draw, dtype=torch.float64) * 1e9,
    )


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dim", "mail_dim", "slots"), [(1, 0, 1), (4, 3, 1), (3, 5, 3), (2, 1, 2)])
def test_rows_hold_every_bit(place, dim, mail_dim, slots):
    memory = NodeMemory(9, dim, mail_dim, slots, place, start=7.0)
    fresh = memory.read(torch.tensor([8, 0]))
    assert not fresh.memory.any()
    assert fresh.memory_times.tolist() == [7, 7]
    assert (fresh.mail_times == NO_MAIL).all()
    state = random_state(3, memory.layout)
    nodes = torch.tensor([5, 0, 8])
    memory.write(nodes, *state)
    assert memory.version == 1
    assert_same(memory.read(nodes), state)
    assert_same(memory.read(torch.tensor([5, 5])), (part[[0, 0]] for part in state))
    assert not memory.read(torch.tensor([1])).memory.any()
    assert memory.layout.row_bytes % 8 == 0
    assert memory.num_bytes == 9 * memory.layout.row_bytes
    # Without mail, that which is there stays.
    memory.write(nodes[:1], state.memory[1:2], state.memory_times[1:2])
    assert_same(
        memory.read(nodes[:1]),
        (state.memory[1:2], state.memory_times[1:2], state.mail[:1], state.mail_times[:1]),
    )
    memory.reset()
    assert_same(memory.read(torch.tensor([8, 0])), fresh)
    assert memory.version == 3
    memory.close()


@given(
    entries=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12),
    seed=st.integers(0, 99),
)
def test_the_latest_entry_of_a_node_counts(entries, seed):
    nodes = torch.tensor([n for n, _ in entries], dtype=torch.int64)
    times = torch.tensor([t for _, t in entries], dtype=torch.float64)
    expected = {}
    for at, (node, t) in enumerate(entries):
        if node not in expected or t >= entries[expected[node]][1]:
            expected[node] = at
    assert sorted(latest(nodes, times).tolist()) == sorted(expected.values())
    memory = NodeMemory(5, 2, 1)
    state = random_state(len(entries), memory.layout, seed)._replace(memory_times=times)
    memory.write(nodes, *state)
    for node, at in expected.items():
        assert torch.equal(memory.read(torch.tensor([node])).memory[0], state.memory[at])


def test_refused_writes_change_nothing(unchecked):
    memory = NodeMemory(4, 2, 3)
    state = random_state(2, memory.layout)
    memory.write(torch.tensor([1, 2]), *state)
    before = memory.snapshot()["rows"]
    good = random_state(2, memory.layout, 1)
    bad_memory = good.memory.clone()
    bad_memory[1, 0] = float("nan")
    bad_times = good.mail_times.clone()
    bad_times[0] = float("inf")
    nodes = torch.tensor([3, 1])
    for given_, told in (
        ((nodes, bad_memory, *good[1:]), r"1 of 2 nodes, the first \[1\]; nothing was written"),
        ((nodes, *good[:3], bad_times), r"the first \[3\]"),
        ((torch.tensor([3, 4]), *good), r"nodes in \[0, 4\), got 4; call grow\(5\)"),
        ((torch.tensor([3, -1]), *good), "got -1"),
        ((nodes.int(), *good), "nodes int64"),
        ((nodes, good.memory[:, :1], *good[1:]), r"memory \[2, 2\], got \[2, 1\]"),
        ((nodes, good.memory[:1], *good[1:]), r"memory \[2, 2\], got \[1, 2\]"),
        ((nodes, *good[:2], good.mail, None), "both mail and mail_times"),
    ):
        with pytest.raises(DataError, match=told):
            memory.write(*given_)
    assert torch.equal(memory.snapshot()["rows"], before)
    assert memory.version == 1


def test_growth_keeps_rows():
    memory = NodeMemory(0, 2, 1, start=3.0)
    memory.grow(2)
    state = random_state(2, memory.layout)
    memory.write(torch.tensor([0, 1]), *state)
    memory.grow(5)
    memory.grow(1)
    assert memory.num_nodes == 5
    assert_same(memory.read(torch.tensor([0, 1])), state)
    assert memory.read(torch.tensor([4])).memory_times.tolist() == [3.0]


def test_snapshots_go_back(tmp_path):
    memory = NodeMemory(6, 2, 3, 2)
    memory.write(torch.tensor([1, 2]), *random_state(2, memory.layout))
    kept = memory.snapshot()
    memory.save(tmp_path / "deep" / "memory.safetensors")
    memory.write(torch.arange(6), *random_state(6, memory.layout, 1))
    memory.restore(kept)
    assert torch.equal(memory.snapshot()["rows"], kept["rows"])
    other = NodeMemory(2, 2, 3, 2)
    other.load(tmp_path / "deep" / "memory.safetensors")
    assert torch.equal(other.snapshot()["rows"], kept["rows"])
    with pytest.raises(DataError, match="expected a snapshot of RowLayout"):
        NodeMemory(6, 2, 3).restore(kept)
    (tmp_path / "cut").write_bytes((tmp_path / "deep" / "memory.safetensors").read_bytes()[:50])
    with pytest.raises(DataError, match="expected a memory that `save` wrote"):
        other.load(tmp_path / "cut")


def test_what_is_preserved_is_as_it_was_even_after_an_error():
    memory = NodeMemory(6, 2, 1)
    memory.write(torch.arange(3), *random_state(3, memory.layout))
    before = memory.snapshot()["rows"]

    def fails():
        with memory.preserved():
            writes()
            raise ValueError("on purpose")

    def writes():
        memory.write(torch.tensor([1, 4]), *random_state(2, memory.layout, 1))
        memory.write(torch.tensor([4, 5]), *random_state(2, memory.layout, 2))
        with pytest.raises(ConfigError, match="no other such block"), memory.preserved():
            pass
        with pytest.raises(ConfigError, match="no open `preserved` block"):
            memory.reset()

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    assert torch.equal(memory.snapshot()["rows"], before)


def test_processes_share_rows_by_name(shared_place):
    place = shared_place
    first = NodeMemory(4, 2, 1, place=place)
    second = NodeMemory(4, 2, 1, place=place)
    state = random_state(1, first.layout)
    first.write(torch.tensor([2]), *state)
    assert_same(second.read(torch.tensor([2])), state)
    assert second.version == 1
    with pytest.raises(DataError, match="take another name, or remove the file"):
        NodeMemory(5, 2, 1, place=place)
    with pytest.raises(ConfigError, match="cannot grow"):
        first.grow(9)
    second.close()
    first.close()
    assert NodeMemory(4, 2, 1, place=place).version == 0


def test_places_and_sizes_that_make_no_sense(unchecked):
    for given_, told in (
        ({"place": "moon"}, "expected 'cpu', 'pinned'"),
        ({"place": "shm:"}, "expected 'cpu', 'pinned'"),
        ({"num_nodes": -1}, "num_nodes of at least 0"),
        ({"dim": 0}, "dim and slots of at least 1"),
        ({"slots": 0}, "dim and slots of at least 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            NodeMemory(**({"num_nodes": 2, "dim": 2, "mail_dim": 1} | given_))
    if not torch.cuda.is_available():
        for place_ in ("pinned", "cuda", "cuda:1"):
            with pytest.raises(ConfigError, match=f"place: expected a GPU for '{place_}', got 0"):
                NodeMemory(2, 2, 1, place=place_)


def test_layout_of_the_published_row():
    # State, time, message of two states and features, and its time: TGN's row on Wikipedia's features.
    assert RowLayout(100, 2 * 100 + 16).row_bytes == 4 * (100 + 216) + 2 * 8


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_found_wherever_it_is(slots, part, number):
    memory = NodeMemory(9, 2, 3, slots)
    before = memory.snapshot()["rows"]
    state = memory.read(torch.tensor([4, 0, 7]))
    state[part][1] = number
    state[0][2] = float("inf")
    with pytest.raises(
        DataError, match=r"for 2 of 3 nodes, the first \[0, 7\]; nothing was written"
    ):
        memory.write(torch.tensor([4, 0, 7]), *state)
    assert torch.equal(memory.snapshot()["rows"], before)
    assert memory.version == 0


def test_numbers_whose_sum_is_too_large_are_finite_all_the_same():
    memory = NodeMemory(3, 2, 3)
    state = memory.read(torch.arange(3))
    state.memory.fill_(3e38)
    memory.write(torch.arange(3), *state)
    assert torch.equal(memory.read(torch.arange(3)).memory, state.memory)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_message_at_time_zero_is_a_message(slots):
    memory = NodeMemory(3, 2, 3, slots)
    state = random_state(1, memory.layout)
    times = torch.full_like(state.mail_times, NO_MAIL)
    times.view(-1)[0] = 0.0
    memory.write(torch.tensor([1]), *state._replace(mail_times=times))
    has_mail, newest = newest_mail(memory.read(torch.arange(3)))
    assert has_mail.tolist() == [False, True, False]
    assert newest[1] == 0.0


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(tmp_path, synced):
    memory = NodeMemory(6, 2, 3)
    memory.save(tmp_path / "memory.safetensors")
    assert synced.replaced == [(tmp_path / "memory.safetensors", True)]


@pytest.mark.parametrize("where", ["cpu", "shared_place", "server_place"])
def test_no_row_is_read_half_written(request, where):
    """A stale fetch reads rows that the thread of writes may be replacing."""
    place = where if where == "cpu" else request.getfixturevalue(where)
    memory, nodes = NodeMemory(64, 1024, 0, place=place), torch.arange(64)
    words = memory.layout.num_words

    def write(count):
        for value in range(count):
            memory.write_rows(nodes, torch.full((64, words), float(value)))

    write(1)
    memory.read_rows(nodes)  # the first read also compiles
    writer = threading.Thread(target=write, args=(300,))
    writer.start()
    while writer.is_alive():
        rows = memory.read_rows(nodes)
        assert torch.equal(rows, rows[:, :1].expand(-1, words))
    writer.join()
    memory.close()


def test_sparse_ids_are_refused_before_a_petabyte_is_allocated():
    with pytest.raises(
        DataError, match=r"got ids up to 999,999,999,999 at [\d,]+ bytes each; number"
    ):
        NodeMemory(10**12, 100, 100)
