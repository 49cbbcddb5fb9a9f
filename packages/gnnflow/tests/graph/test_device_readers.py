"""Writers of a graph and the kernels that read it wait for each other; streams are stand-ins."""

import threading
from types import SimpleNamespace

import pytest
import torch

import gnnflow as gf
from gnnflow.graph import block_store
from gnnflow.graph.device_readers import DeviceReaders

HOST = torch.device("cpu")


class Event:
    """As `torch.cuda.Event`, of streams that say how much they were given and have done."""

    def record(self, stream):
        self.stream, self.given = stream, stream.given

    def synchronize(self):
        self.stream.waited.append(self.given)
        self.stream.done = max(self.stream.done, self.given)


@pytest.fixture
def streams(monkeypatch):
    """Two streams, and which of them is current."""
    made = [
        SimpleNamespace(cuda_stream=number, given=0, done=0, waited=[], after=[])
        for number in range(2)
    ]
    for stream in made:
        stream.wait_event = lambda event, own=stream: own.after.append(
            (event.stream.cuda_stream, event.given)
        )
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: made[getattr(current, "number", 0)]
    )
    made[0].use = lambda number: setattr(current, "number", number)
    return made


def test_all_streams_are_waited_for_once_up_to_their_last_mark(streams):
    readers = DeviceReaders(torch.device("cuda", 0))
    for number, given in ((0, 1), (1, 5), (0, 2)):
        streams[0].use(number)
        streams[number].given = given
        readers.record()
    streams[0].given = 3  # of somebody else
    readers.wait()
    assert [stream.waited for stream in streams] == [[2], [5]]
    readers.wait()
    assert [stream.waited for stream in streams] == [[2], [5]]


def test_streams_wait_for_each_other_and_the_host_for_none(streams):
    readers = DeviceReaders(torch.device("cuda", 0))
    readers.order_after_write()  # of nothing yet
    streams[0].given = 3
    readers.record()
    streams[0].use(1)
    readers.order_after_readers()
    streams[1].given = 7
    readers.record_write()
    streams[1].given = 8  # of somebody else
    streams[0].use(0)
    readers.order_after_write()
    assert [stream.after for stream in streams] == [[(1, 7)], [(0, 3)]]
    assert [stream.waited for stream in streams] == [[], []]


def test_copies_are_read_after_the_last_write_and_written_after_the_last_read(monkeypatch):
    done = []
    names = ("record", "wait", "order_after_readers", "order_after_write", "record_write")
    readers = SimpleNamespace(**{name: lambda name=name: done.append(name) for name in names})
    monkeypatch.setattr(block_store, "find_device", lambda placement: HOST)
    monkeypatch.setattr(block_store, "watch_readers", lambda placement, device: readers)
    graph = gf.TemporalGraph(placement="cuda")
    for _ in range(2):
        graph.add_edges([0], [1], [2])
        with graph.reading:
            done.append("read")
    read = ["order_after_write", "read", "record"]
    assert done == ["order_after_readers", "record_write", *read] * 2


def test_only_a_graph_on_a_gpu_is_watched():
    gpu = torch.device("cuda", 0)
    watched = [
        (placement, device.type)
        for placement in ("cpu", "cuda", "hybrid")
        for device in (HOST, gpu)
        if block_store.watch_readers(placement, device) is not None
    ]
    assert watched == [("cuda", "cuda"), ("hybrid", "cuda")]


class Kernels:
    """Readers that run, as on a GPU, only when they are waited for, and see what memory holds then."""

    def __init__(self):
        self.running, self.seen = [], []

    def record(self):
        self.running.append(self.launch())

    def order_after_write(self):
        """Nothing: one stream."""

    record_write = order_after_write

    def wait(self):
        self.seen += [kernel() for kernel in self.running]
        self.running.clear()


def change_by_adding(graph):
    graph.add_edges([0, 0, 1], [2, 3, 3], [30, 31, 32])


def change_by_many(graph):
    """The slabs are replaced by larger ones."""
    graph.add_edges(torch.zeros(5_000).long(), torch.ones(5_000).long(), torch.arange(40, 5_040))


def change_by_expiring(graph):
    graph.expire(before=12)


def change_by_late_edges(graph):
    graph.add_edges([0], [4], [3], late="merge")


def change_by_loading(graph):
    other = gf.TemporalGraph(placement="hybrid")
    other.add_edges([0], [9], [1])
    graph.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        change_by_adding,
        change_by_many,
        change_by_expiring,
        change_by_late_edges,
        change_by_loading,
    ],
)
def test_what_was_launched_is_read_before_anything_changes(monkeypatch, change):
    kernels = Kernels()
    monkeypatch.setattr(block_store, "find_device", lambda placement: HOST)
    monkeypatch.setattr(
        block_store, "watch_readers", lambda placement, device: kernels if first else None
    )
    first = True
    graph = gf.TemporalGraph(placement="hybrid")
    first = False
    kernels.launch = lambda: lambda: None
    graph.add_edges([0] * 20, list(range(20)), list(range(20)))
    columns = ("neighbors", "times", "eids")
    with graph.reading as adjacency:
        held = [getattr(adjacency, name) for name in columns]
        expected = [column.clone() for column in held]
        kernels.launch = lambda: lambda: all(map(torch.equal, held, expected))
    assert len(kernels.running) == 1
    change(graph)
    assert not kernels.running
    assert kernels.seen[-1] is True
