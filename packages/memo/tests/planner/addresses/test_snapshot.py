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
        (pickle.dumps({"device_traces": [[entry("teleport", 1, 1)]]}), "entry 0.*got 'teleport'"),
        (pickle.dumps({"device_traces": [[entry("snapshot")]]}), "expected allocations.*got none"),
    ],
)
def test_broken_files_are_refused_by_path(tmp_path, data, text):
    path = tmp_path / "broken.pickle"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"broken.pickle.*{text}"):
        memo.Trace.from_cuda_snapshot(path)
