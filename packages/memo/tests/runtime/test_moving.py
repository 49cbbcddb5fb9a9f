"""Cargo by threads: what is fetched ahead, and what waits until it is asked for."""

import pytest
import torch

from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.threads import ThreadMover
from memo.runtime.recording.items import Item
from memo.runtime.stores import MemoryStore


class Record:
    """What cargo belongs to: only whether it is alive counts."""

    is_taken = True

    def __init__(self):
        self.items = []

    def run(self):
        raise AssertionError("nothing runs here")


@pytest.fixture
def buffers():
    return Buffers(1, torch.device("cpu"))


@pytest.fixture
def mover(buffers):
    mover = ThreadMover(MemoryStore(), buffers)
    yield mover
    mover.close()


def load(mover, value):
    record = Record()
    item = Item.of("x", [torch.full((40, 100), float(value))])
    return record, item, mover.load(record, [item])


def test_nothing_is_fetched_ahead_where_no_buffer_is_free(mover, buffers):
    loaded = [load(mover, value) for value in (1, 2)]
    for _, item, cargo in loaded:
        mover.send(cargo)
        mover.await_sent(cargo)
        assert item.tensors == []
    for _, _, cargo in reversed(loaded):
        mover.fetch(cargo)
    (_, first, waiting), (_, second, back) = loaded
    assert waiting.fetched is None, "the one buffer is in use"
    mover.await_fetched(back)
    assert buffers.num_spare == 0
    assert second.tensors[0].unique().tolist() == [2.0]
    mover.give_back(back)
    assert second.tensors == [], "what is in the buffer next is no longer its own"
    mover.fetch(waiting)
    assert waiting.fetched is not None
    mover.await_fetched(waiting)
    assert first.tensors[0].unique().tolist() == [1.0]
    assert buffers.num_spare == 0


def test_who_cannot_wait_gets_a_spare_buffer(mover, buffers):
    loaded = [load(mover, value) for value in (1, 2)]
    for _, _, cargo in loaded:
        mover.send(cargo)
        mover.await_fetched(cargo)
    assert buffers.num_spare == 1
    for value, (_, item, cargo) in enumerate(loaded, 1):
        assert item.tensors[0].unique().tolist() == [value]
        mover.give_back(cargo)
    assert mover.times.sent_bytes == mover.times.fetched_bytes == 2 * 40 * 100 * 4


def test_slots_and_buffers_come_back_when_a_record_is_gone(mover, buffers):
    record, _, cargo = load(mover, 1)
    mover.send(cargo)
    mover.await_fetched(cargo)
    assert not buffers.has_free()
    del record
    assert buffers.has_free()
    again, _, other = load(mover, 2)
    assert other.slot == cargo.slot
    del again
