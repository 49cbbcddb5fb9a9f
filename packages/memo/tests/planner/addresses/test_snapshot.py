import collections
import os
import pickle

import pytest

import memo
from shared.errors import DataError


def entry(action, address=0, size=0):
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "frames": [],
        "time_us": 1,
    }


def write(path, *histories):
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": list(histories)}))
    return path


STEP = [
    entry("segment_alloc", 0x1000, 2 << 20),
    entry("alloc", 0x1000, 1024),
    entry("alloc", 0x1400, 512),
    entry("free_requested", 0x1000, 1024),
    entry("free_completed", 0x1000, 1024),
    entry("alloc", 0x1000, 256),
    entry("snapshot"),
]


def test_a_snapshot_becomes_a_trace(tmp_path):
    trace = memo.Trace.from_cuda_snapshot(write(tmp_path / "one.pickle", STEP, []))
    assert trace.intervals == ((0, 2, 1024), (1, 4, 512), (3, 4, 256))
    assert trace.load_bytes == 1536
    assert trace.dropped == {"entries of other kinds": 3}


def test_a_wrapped_history_is_trimmed_with_counts(tmp_path):
    wrapped = [entry("free_completed", 0x9000, 64), entry("free_completed", 0x9100, 64), *STEP]
    trace = memo.Trace.from_cuda_snapshot(write(tmp_path / "wrapped.pickle", wrapped))
    assert trace.sizes == (1024, 512, 256)
    assert trace.dropped["frees of what was allocated before"] == 2


def test_a_missing_free_is_refused(tmp_path):
    path = write(tmp_path / "torn.pickle", [entry("alloc", 0x10, 8), entry("alloc", 0x10, 8)])
    with pytest.raises(DataError, match="entry 1: address 0x10 is allocated while it is alive"):
        memo.Trace.from_cuda_snapshot(path)


LIVE = [entry("alloc", 0x1000, 1024), entry("alloc", 0x2000, 512)]
FREED = [*LIVE, entry("free_completed", 0x1000, 1024)]


@pytest.mark.parametrize(
    ("history", "text"),
    [
        ([*FREED, entry("free_completed", 0x1000, 1024)], "entry 3: address 0x1000 is freed, but entry 2 freed it"),
        ([*FREED, entry("free", 0x1000, 1024)], "entry 3: address 0x1000 is freed, but entry 2 freed it"),
        ([entry("free", 0x9000, 8)] * 2 + LIVE, "entry 1: address 0x9000 is freed, but entry 0 freed it"),
        ([*LIVE, entry("free_completed", 0x1000, 512)], "entry 2: expected 1,024 bytes .*0x1000, as entry 0 allocated, got 512"),
        ([*LIVE, entry("free_completed", 0x2000, 513)], "entry 2: expected 512 bytes .*0x2000, as entry 1 allocated, got 513"),
        ([*LIVE, entry("alloc", 0x1200, 8)], "entry 2: 8 bytes at address 0x1200 are allocated, but .*0x1000 that entry 0"),
        ([*LIVE, entry("alloc", 0x0F00, 257)], "entry 2: 257 bytes at address 0xf00 are allocated, but .*0x1000"),
        ([*LIVE, entry("alloc", 0x0, 0x9000)], "entry 2: 36,864 bytes at address 0x0 are allocated, but .*0x2000"),
        ([*LIVE, entry("free", 0x1010, 8)], "entry 2: 8 bytes at address 0x1010 are freed, but .*0x1000"),
        ([*LIVE, entry("segment_free", 0x0, 2 << 20)], "entry 2: .* are given back to the device, but"),
        ([*LIVE, entry("segment_unmap", 0x2000, 2 << 20)], "entry 2: .* are given back to the device, but .*0x2000"),
    ],
)  # fmt: skip
def test_histories_that_no_allocator_writes_are_refused_by_entry(tmp_path, history, text):
    path = write(tmp_path / "odd.pickle", history)
    with pytest.raises(DataError, match=f"odd.pickle, {text}"):
        memo.Trace.from_cuda_snapshot(path)


def test_blocks_beside_one_another_and_addresses_used_again_are_read(tmp_path):
    history = [
        *FREED,
        entry("alloc", 0x1000, 256),
        entry("alloc", 0x1100, 768),
        entry("alloc", 0x1400, 0xC00),
        entry("free_completed", 0x1100, 768),
        entry("free_completed", 0x7000, 99),
        entry("alloc", 0x6F00, 0x200),
        entry("segment_free", 0x8000, 2 << 20),
    ]
    trace = memo.Trace.from_cuda_snapshot(write(tmp_path / "dense.pickle", history))
    assert trace.sizes == (1024, 512, 256, 768, 0xC00, 0x200)
    assert trace.dropped["frees of what was allocated before"] == 1


def test_several_devices_are_told_apart(tmp_path):
    path = write(tmp_path / "two.pickle", STEP, [], [entry("alloc", 0x1, 77)])
    with pytest.raises(DataError, match="one device, got that of devices 0, 2"):
        memo.Trace.from_cuda_snapshot(path)
    assert memo.Trace.from_cuda_snapshot(path, device=2).sizes == (77,)
    assert len(memo.Trace.from_cuda_snapshot(path, device=0).sizes) == 3
    with pytest.raises(DataError, match="devices 0, 2, got 1"):
        memo.Trace.from_cuda_snapshot(path, device=1)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_no_code_of_a_snapshot_is_run(tmp_path, protocol):
    made = tmp_path / "made"
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[Evil(str(made))]]}, protocol=protocol))
    with pytest.raises(DataError, match=r"imports .*mkdir; it was not run"):
        memo.Trace.from_cuda_snapshot(path)
    assert not made.exists()


def test_harmless_classes_are_refused_too(tmp_path):
    path = tmp_path / "ordered.pickle"
    path.write_bytes(pickle.dumps(collections.OrderedDict(device_traces=[STEP])))
    with pytest.raises(DataError, match=r"imports collections\.OrderedDict"):
        memo.Trace.from_cuda_snapshot(path)


def test_references_to_the_outside_are_refused(tmp_path):
    path = tmp_path / "reference.pickle"

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return "elsewhere" if obj == "storage" else None

    with path.open("wb") as file:
        Pickler(file, protocol=2).dump({"device_traces": ["storage"]})
    with pytest.raises(DataError, match="got a reference 'elsewhere'"):
        memo.Trace.from_cuda_snapshot(path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a CUDA memory snapshot, the file is empty"),
        (b"not a pickle at all", "expected a pickled snapshot"),
        (pickle.dumps({"device_traces": [STEP]})[:-40], "expected a pickled snapshot"),
        (pickle.dumps([1, 2]), "'device_traces', got list"),
        (pickle.dumps({"segments": []}), "'device_traces', got dict"),
        (pickle.dumps({"device_traces": [STEP, 3]}), "'device_traces'"),
        (pickle.dumps({"device_traces": []}), "got that of none"),
        (pickle.dumps({"device_traces": [[7]]}), "entry 0: expected an action"),
        (pickle.dumps({"device_traces": [[{"addr": 1}]]}), "entry 0: expected an action"),
        (
            pickle.dumps({"device_traces": [[entry("alloc", "x", 1)]]}),
            "entry 0: expected an address",
        ),
        (
            pickle.dumps({"device_traces": [[entry("alloc", 1, -1)]]}),
            "entry 0: expected an address",
        ),
        *(
            (
                pickle.dumps({"device_traces": [[one]]}),
                "entry 0: expected an address and a size, from 0 on",
            )
            for one in (
                {"action": "alloc", "addr": 1},
                {"action": "alloc", "size": 1},
                {"action": "free_completed", "addr": 1},
                entry("free", -1, 1),
                entry("alloc", True, 1),
                entry("alloc", 1, 1.5),
            )
        ),
        (pickle.dumps({"device_traces": [[entry("teleport", 1, 1)]]}), "entry 0.*got 'teleport'"),
        (pickle.dumps({"device_traces": [[entry("snapshot")]]}), "expected allocations.*got none"),
    ],
)
def test_broken_files_are_refused_by_path(tmp_path, data, text):
    path = tmp_path / "broken.pickle"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"broken.pickle.*{text}"):
        memo.Trace.from_cuda_snapshot(path)
