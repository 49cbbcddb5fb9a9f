"""Files of shared memory are written to again, but never under a tensor that lives."""

import gc
import os
from pathlib import Path

import pytest
import torch

from hybridflow.workers.engines.shared_memory import SharedMemory, make_folder

LENGTH = 1 << 14


@pytest.fixture
def folder():
    path = make_folder()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
def memory(folder):
    return SharedMemory(folder, "one", is_keeper=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_to_again_once_nobody_wants_its_value(folder, memory):
    first = memory.pack(torch.zeros(LENGTH))
    number = Path(first.file).stat().st_ino
    assert torch.equal(memory.load(first), torch.zeros(LENGTH))
    del first
    second = memory.pack(torch.ones(LENGTH))
    assert Path(second.file).stat().st_ino == number
    assert torch.equal(memory.load(second), torch.ones(LENGTH))
    assert names(folder) == ["one-1"]


def test_a_tensor_that_lives_keeps_its_value(folder, memory):
    handle = memory.pack(torch.zeros(LENGTH))
    kept = memory.load(handle)[10:20]
    del handle
    others = [memory.pack(torch.full((LENGTH,), float(k))) for k in range(1, 4)]
    assert torch.equal(kept, torch.zeros(10))
    assert [float(memory.load(other)[0]) for other in others] == [1, 2, 3]
    assert len(names(folder)) == 3


def test_what_a_reader_changes_stays_its_own(memory):
    handle = memory.pack(torch.zeros(LENGTH))
    memory.load(handle).fill_(5)
    assert torch.equal(memory.load(handle), torch.zeros(LENGTH))


def test_a_handle_that_lives_keeps_its_file(memory):
    kept = memory.pack(torch.zeros(LENGTH))
    memory.pack(torch.ones(LENGTH))
    memory.pack(torch.ones(LENGTH))
    assert torch.equal(memory.load(kept), torch.zeros(LENGTH))


def test_what_another_process_wrote_is_written_to_again_by_it(folder, memory):
    rank = SharedMemory(folder, "rank0")
    handle = memory.adopt(rank.pack(torch.zeros(LENGTH)))
    number = Path(handle.file).stat().st_ino
    memory.pack(torch.ones(LENGTH))
    assert Path(rank.pack(torch.ones(LENGTH)).file).stat().st_ino != number
    del handle
    assert Path(rank.pack(torch.ones(LENGTH)).file).stat().st_ino == number


def test_a_much_larger_file_is_left_for_larger_values(memory):
    large = memory.pack(torch.zeros(4 * LENGTH))
    number = Path(large.file).stat().st_ino
    del large
    small = memory.pack(torch.ones(LENGTH))
    again = memory.pack(torch.ones(3 * LENGTH))
    assert Path(small.file).stat().st_ino != number == Path(again.file).stat().st_ino


def test_free_files_are_bounded(folder):
    memory = SharedMemory(folder, "one", is_keeper=True, most_free_bytes=10 * 4 * LENGTH)
    handles = [memory.pack(torch.zeros(LENGTH)) for _ in range(40)]
    del handles
    gc.collect()
    assert len(names(folder)) == 10
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10 * 4 * LENGTH


def test_free_files_make_room_when_there_is_none(folder, memory, monkeypatch):
    memory.pack(torch.zeros(LENGTH))
    assert names(folder) == ["one-0.free"]
    write, tries = os.writev, []

    def full_once(fd, pieces):
        tries.append(names(folder))
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return write(fd, pieces)

    monkeypatch.setattr(os, "writev", full_once)
    large = torch.arange(4.0 * LENGTH)
    assert torch.equal(memory.load(memory.pack(large)), large)
    assert tries == [["one-0.free", "one-1"], ["one-1"]]
