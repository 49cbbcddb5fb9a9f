"""Slots of stores: their limits, their reuse, and that no two in use overlap."""

import mmap
import os
import stat
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memo import DoesNotFit
from memo.runtime.device_memory import data_bytes
from memo.runtime.stores import FileStore, MemoryStore, open_store
from memo.runtime.stores.base import ALIGN, make_pages
from memo.runtime.stores.file import file_system_type
from shared.errors import ConfigError, DataError

KINDS = pytest.mark.parametrize("kind", ["memory", "file"])


def make(kind, tmp_path, limit_bytes=None):
    return open_store("memory" if kind == "memory" else f"file:{tmp_path}", limit_bytes)


def aligned(num_bytes):
    """Memory that begins at a page, as buffers do."""
    return np.frombuffer(mmap.mmap(-1, -(-num_bytes // ALIGN) * ALIGN), np.uint8)


def written(store, slot, seed):
    data = np.random.default_rng(seed).integers(0, 256, slot.num_bytes, np.uint8)
    store.write(slot.offset, data)
    return data


def read(store, slot):
    memory = aligned(slot.num_bytes)
    store.read(slot.offset, memory)
    return memory


@KINDS
@pytest.mark.parametrize("num_bytes", [1, ALIGN - 1, ALIGN, 5 * ALIGN + 3, (8 << 20) + 1])
def test_bytes_come_back(kind, num_bytes, tmp_path):
    store = make(kind, tmp_path)
    store.allocate(ALIGN)
    slot = store.allocate(num_bytes)
    assert slot.num_bytes % ALIGN == 0
    assert slot.num_bytes - ALIGN < num_bytes <= slot.num_bytes
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    unaligned = np.empty(num_bytes + 1, np.uint8)[1:]
    unaligned[:] = data
    store.write(slot.offset, unaligned)
    assert np.array_equal(read(store, slot)[:num_bytes], data)
    store.close()
    store.close()


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=30)


@given(SIZES)
def test_slots_in_use_never_overlap_and_keep_their_bytes(steps):
    store, used, held = MemoryStore(), [], 0
    for seed, (pages, drop) in enumerate(steps):
        slot = store.allocate(pages * ALIGN)
        used.append((slot, written(store, slot, seed)))
        held = max(held, sum(one.num_bytes for one, _ in used))
        if drop < len(used):
            store.release(used.pop(drop)[0])
        assert store.used_bytes == sum(one.num_bytes for one, _ in used)
    assert store.peak_bytes == held
    ends = sorted((one.offset, one.offset + one.num_bytes) for one, _ in used)
    assert all(left[1] <= right[0] for left, right in pairwise(ends))
    assert all(np.array_equal(read(store, slot), data) for slot, data in used)


@given(SIZES, st.integers(1, 30))
def test_no_slot_lies_beyond_the_limit(steps, limit_pages):
    store, used = MemoryStore(limit_pages * ALIGN), []
    for pages, drop in steps:
        try:
            used.append(store.allocate(pages * ALIGN))
        except DoesNotFit:
            assert used or pages > limit_pages, "an empty store takes all that its limit allows"
        if drop < len(used):
            store.release(used.pop(drop))
    assert all(one.offset + one.num_bytes <= limit_pages * ALIGN for one in used)
    assert store.peak_bytes <= limit_pages * ALIGN


def test_slots_that_are_given_back_become_one():
    store = MemoryStore(4 * ALIGN)
    slots = [store.allocate(ALIGN) for _ in range(4)]
    with pytest.raises(DoesNotFit):
        store.allocate(1)
    for number in (2, 0, 1):
        store.release(slots[number])
    whole = store.allocate(3 * ALIGN)
    assert (whole.offset, whole.num_bytes) == (0, 3 * ALIGN)


def test_a_longer_slot_takes_the_place_of_the_last():
    store = MemoryStore()
    first, last = store.allocate(ALIGN), store.allocate(ALIGN)
    store.release(last)
    longer = store.allocate(3 * ALIGN)
    assert longer.offset == first.num_bytes
    data = written(store, longer, 1)
    assert np.array_equal(read(store, longer), data), "over two chunks of memory"


def test_the_file_is_direct_unlinked_and_as_long_as_its_limit(tmp_path):
    store = FileStore(tmp_path, reserve_bytes=3 * ALIGN + 1)
    assert os.listdir(tmp_path) == []
    opened = [
        os.path.join("/proc/self/fd", name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(os.path.join("/proc/self/fd", name))
        and str(tmp_path) in os.readlink(os.path.join("/proc/self/fd", name))
    ]
    (path,) = opened
    found = os.stat(path)
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_nlink, found.st_size) == (0, 4 * ALIGN)
    with open(f"/proc/self/fdinfo/{os.path.basename(path)}") as file:
        flags = int(next(line for line in file if line.startswith("flags")).split()[1], 8)
    assert flags & os.O_DIRECT or not _takes_direct(tmp_path)
    store.close()
    assert not os.path.exists(path)


def _takes_direct(folder):
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_folder_without_direct_io_is_used_and_named(tmp_path, monkeypatch, caplog):
    plain = os.open

    def refuse(name, flags, *rest, **settings):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain(name, flags, *rest, **settings)

    monkeypatch.setattr(os, "open", refuse)
    store = FileStore(tmp_path)
    monkeypatch.undo()
    assert "takes no direct I/O" in caplog.text
    slot = store.allocate(100)
    data = written(store, slot, 0)
    assert np.array_equal(read(store, slot), data)
    store.close()


def test_short_moves_are_continued(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:ALIGN], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:ALIGN]], at))
    store = FileStore(tmp_path)
    slot = store.allocate(5 * ALIGN)
    data = written(store, slot, 0)
    assert np.array_equal(read(store, slot), data)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(DataError, match="no more bytes could be moved"):
        read(store, slot)


@pytest.mark.parametrize("name", ["disk", "file:", "", "Memory"])
def test_unknown_stores_are_refused(name):
    with pytest.raises(ConfigError, match=r"expected 'memory', 'pinned' or 'file:DIR'"):
        open_store(name)


def test_a_file_for_a_gpu_is_refused_before_it_is_made(tmp_path):
    text = (
        f"expected 'pinned' or 'memory' for a model on a GPU, got 'file:{tmp_path}/new'; plan again"
    )
    with pytest.raises(ConfigError, match=text):
        open_store(f"file:{tmp_path}/new", device=torch.device("cuda"))
    assert list(tmp_path.iterdir()) == []


class Registered:
    """CUDA's registry of pinned pages, by their address."""

    def __init__(self):
        self.pages = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        self.pages[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pages[address]
        return 0


@pytest.mark.parametrize("ends_by", ["close", "del"])
def test_what_is_pinned_is_what_was_asked_for_and_given_back(ends_by, monkeypatch):
    """torch's own allocator would pin the next power of two, and keep it."""
    cuda = Registered()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    store = open_store("pinned", 9 * ALIGN, 5 * ALIGN)
    assert list(cuda.pages.values()) == [5 * ALIGN], "before the first step"
    slots = [store.allocate(2 * ALIGN) for _ in range(3)]
    assert sum(cuda.pages.values()) == 6 * ALIGN
    written_last = written(store, slots[2], 0)
    assert np.array_equal(read(store, slots[2]), written_last), "over two stretches of pages"
    with pytest.raises(DoesNotFit):
        store.allocate(4 * ALIGN)
    if ends_by == "close":
        store.close()
        store.close()
    else:
        del store
    assert cuda.pages == {}


def test_pages_count_towards_a_limit_of_the_process_s_data():
    before = data_bytes()
    pages = make_pages(64 << 20)
    assert data_bytes() - before >= 64 << 20
    assert pages.ctypes.data % ALIGN == 0
    pages[:] = 1


@pytest.mark.parametrize(
    ("number", "name"), [(0x01021994, "tmpfs"), (0x858458F6, "ramfs"), (0x958458F6, "hugetlbfs")]
)
def test_a_folder_whose_files_are_memory_is_refused_before_it_is_made(
    number, name, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "memo.runtime.stores.file.file_system_type", lambda folder: asked.append(folder) or number
    )
    with pytest.raises(ConfigError, match=f"expected a folder on a disk, got one on {name}, whose"):
        open_store(f"file:{tmp_path}/one/two")
    assert asked == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_file_systems_are_told_apart_by_their_types(tmp_path):
    kinds = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, folder, kind, *_ = line.split()
        kinds[folder] = kind  # the last mount on a folder is the one that is seen
    assert file_system_type(Path("/proc")) == 0x9FA0
    assert file_system_type(tmp_path / "nowhere") == 0
    if kinds.get("/dev/shm") == "tmpfs":
        assert file_system_type(Path("/dev/shm")) == 0x01021994
