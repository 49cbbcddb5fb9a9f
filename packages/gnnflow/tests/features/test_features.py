"""Rows by id from every kind of source, against numpy's indexing."""

import io
import json
import threading
from itertools import pairwise

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from gnnflow.features.files import RemoteMatrix, open_matrix
from gnnflow.features.store import FeatureStore
from shared.errors import ConfigError, DataError

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def matrix(num_rows, dim, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, dim, generator=draw) * 50).to(dtype)


def as_npy(x):
    stream = io.BytesIO()
    np.save(stream, x.numpy())
    return stream.getvalue()


@pytest.fixture
def put():
    """put(name, data) -> URL in memory, removed afterwards."""
    fs = fsspec.filesystem("memory")

    def write(name, data):
        fs.pipe_file(f"/features/{name}", data)
        return f"memory://features/{name}"

    yield write
    fs.rm("/features", recursive=True)


@pytest.fixture
def reads(monkeypatch):
    """The (start, end) of each read of a file in memory."""
    seen = []
    plain = MemoryFileSystem.cat_file

    def counted(self, path, start=None, end=None, **options):
        seen.append((start, end))
        return plain(self, path, start, end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return seen


def sources(x, folder, put):
    """One matrix in every form it may come in."""
    if x.dtype != torch.bfloat16:
        np.save(folder / "x.npy", x.numpy())
        readonly = x.numpy().copy()
        readonly.setflags(write=False)
        yield from (x.numpy(), readonly, np.load(folder / "x.npy", mmap_mode="r"))
        yield from (folder / "x.npy", str(folder / "x.npy"), f"file://{folder}/x.npy")
        yield put("x.npy", as_npy(x))
    save_file({"a": matrix(3, 2), "b::c": x}, folder / "x.safetensors")
    save_file({"x": x}, folder / "one.safetensors", metadata={"format": "pt"})
    yield from (x, x.repeat(1, 2)[:, : x.shape[1]], x.T.contiguous().T)
    yield from (f"{folder}/x.safetensors::b::c", f"{folder}/one.safetensors")
    yield put("x.safetensors", save({"a": matrix(3, 2), "b": x})) + "::b"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_every_form_and_type_gives_the_rows_of_plain_indexing(dtype, num_rows, tmp_path, put):
    x = matrix(num_rows, 5, dtype)
    ids = torch.randint(0, num_rows, (50,)) if num_rows else torch.empty(0, dtype=torch.int64)
    for source in sources(x, tmp_path, put):
        store = FeatureStore(edge=source)
        assert (store.num_rows("edge"), store.dim("edge")) == (num_rows, 5)
        assert (store.num_edges, store.edge_dim, store.num_nodes, store.node_dim) == (
            num_rows,
            5,
            0,
            0,
        )
        rows = store.gather("edge", ids)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, x.float()[ids])
        out = torch.empty(len(ids), 5)
        assert store.gather("edge", ids, out) is out
        assert torch.equal(out, rows)


@given(
    base=st.integers(0, 6) | st.none(),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**31)), max_size=8),
    form=st.sampled_from(["tensor", "half", "remote"]),
)
def test_appended_rows_follow_those_that_were_given(base, steps, form):
    first = None if base is None else matrix(base, 3).half()
    known = torch.empty(0, 3) if first is None else first.float()
    fs = fsspec.filesystem("memory")
    if form == "remote" and first is not None:
        fs.pipe_file("/grown.npy", as_npy(first))
        store = FeatureStore(node="memory://grown.npy")
    else:
        store = FeatureStore(node=first.float() if form == "tensor" and base else first)
    for count, seed in steps:
        rows = matrix(count, 3, seed=seed)
        store.append("node", rows.numpy() if seed % 2 else rows)
        known = torch.cat([known, rows])
        assert store.num_nodes == len(known)
        draw = torch.Generator().manual_seed(seed)
        if len(known):
            ids = torch.randint(0, len(known), (12,), generator=draw)
            assert torch.equal(store.gather("node", ids), known[ids])
        with pytest.raises(DataError, match=str(len(known))):
            store.gather("node", torch.tensor([len(known)]))
    if first is not None:
        assert torch.equal(first.float(), known[:base]), "what was given is never written to"


def test_growth_copies_rows_a_few_times_only(monkeypatch):
    store = FeatureStore(edge=torch.zeros(1, 4))
    allocate, num_allocations = torch.Tensor.new_empty, 0

    def count(self, *arguments, **options):
        nonlocal num_allocations
        num_allocations += 1
        return allocate(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", count)
        for at in range(2000):
            store.append("edge", torch.full((1, 4), float(at)))
    assert 2 <= num_allocations <= 12
    ids = torch.arange(2001)
    assert torch.equal(store.gather("edge", ids)[:, 0], (ids - 1).clamp(min=0).float())


def test_a_file_larger_than_memory_is_read_where_it_is_asked(tmp_path):
    num_rows, path = 1 << 30, tmp_path / "large.npy"
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, 64)}
        np.lib.format.write_array_header_2_0(file, header)
        start = file.tell()
        file.seek(start + (num_rows - 2) * 256)
        file.write(np.full(64, 7, np.float32).tobytes())
        file.truncate(start + num_rows * 256)  # 256 GiB, of which one block is on disk
    store = FeatureStore(node=path)
    rows = store.gather("node", torch.tensor([num_rows - 2, 5, num_rows - 1]))
    assert rows[:, 0].tolist() == [7, 0, 0]


@given(
    ids=st.lists(st.integers(0, 9999), max_size=30),
    gap_rows=st.sampled_from([0, 1, 40, 10**6]),
)
@example(ids=[5, 6, 8, 49, 90], gap_rows=0)
@example(ids=[5, 6, 8, 49, 90], gap_rows=1)
@example(ids=[5, 6, 8, 49, 90], gap_rows=40)
@settings(max_examples=30)
def test_remote_rows_are_read_by_ranges_that_cover_them(ids, gap_rows):
    x = matrix(10_000, 4, torch.float64)
    fsspec.filesystem("memory").pipe_file("/ranges.safetensors", save({"x": x}))
    ids = torch.tensor(ids, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        remote = open_matrix(
            "memory://ranges.safetensors::x", whole_bytes=1000, gap_bytes=gap_rows * 32
        )
        ranges = []
        plain = MemoryFileSystem.cat_file

        def counted(self, path, start=None, end=None, **options):
            ranges.append((start, end))
            return plain(self, path, start, end, **options)

        patch.setattr(MemoryFileSystem, "cat_file", counted)
        assert isinstance(remote, RemoteMatrix)
        assert torch.equal(remote.gather(ids), x[ids])
    wanted = sorted(set(ids.tolist()))
    expected = 0
    for before, after in zip([None, *wanted], wanted, strict=False):
        expected += before is None or after - before - 1 > gap_rows
    assert len(ranges) == expected, "one request for rows that are near each other"
    allowed = len(wanted) * 32 + sum(
        (b - a - 1) * 32 for a, b in pairwise(wanted) if b - a - 1 <= gap_rows
    )
    assert sum(end - start for start, end in ranges) == allowed


def test_a_small_remote_matrix_is_read_once(put, reads):
    x = matrix(100, 4)
    store = FeatureStore(node=put("small.npy", as_npy(x)))
    opened = len(reads)
    for seed in range(3):
        ids = torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(store.gather("node", ids), x[ids])
    assert len(reads) == opened + 1


def test_a_header_longer_than_the_first_read(put):
    tensors = {f"tensor-{at:05}": matrix(2, 3, seed=at) for at in range(1000)}
    url = put("many.safetensors", save(tensors))
    store = FeatureStore(node=f"{url}::tensor-00777")
    assert torch.equal(store.gather("node", torch.arange(2)), tensors["tensor-00777"])


def test_rows_are_gathered_while_others_are_appended():
    store = FeatureStore(edge=torch.zeros(1, 2))
    wrong = []

    def append():
        for at in range(1, 3000):
            store.append("edge", torch.full((1, 2), float(at)))

    writer = threading.Thread(target=append)
    writer.start()
    while writer.is_alive():
        ids = torch.arange(store.num_edges)
        if not torch.equal(store.gather("edge", ids)[:, 1], ids.float()):
            wrong.append(len(ids))
    writer.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["node", "edge"])
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_an_id_without_a_row_is_named(kind, bad):
    store = FeatureStore(node=torch.zeros(10, 2), edge=torch.zeros(10, 2))
    with pytest.raises(DataError, match=rf"{kind} ids in \[0, 10\), got {bad}.*10 rows"):
        store.gather(kind, torch.tensor([3, bad, 4]))


def test_bad_requests():
    store = FeatureStore(node=torch.zeros(4, 2))
    with pytest.raises(DataError, match="edge features for 1 ids, but there are none"):
        store.gather("edge", torch.tensor([0]))
    with pytest.raises(DataError, match="expected out float32"):
        store.gather("node", torch.tensor([0]), torch.empty(1, 3))
    with pytest.raises(DataError, match="2 columns"):
        store.append("node", torch.zeros(1, 3))
    assert store.num_nodes == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(4), "at least 1 column"),
        (torch.zeros(4, 0), "at least 1 column"),
        (torch.zeros(4, 2, dtype=torch.complex64), "real numbers"),
        (np.array([["a"]]), "type that torch supports"),
        (np.zeros((2, 2), ">f4"), "type that torch supports"),
        (np.zeros((2, 2))[::-1], "type that torch supports"),
    ],
)
def test_what_is_no_matrix_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        FeatureStore(node=source)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent.npy", DataError, "expected a file"),
        ("absent.safetensors::x", DataError, "expected a file"),
        ("good.safetensors::y", DataError, "name of a tensor, got 'y'; there are a, x"),
        ("good.safetensors", DataError, "name of a tensor"),
        ("good.safetensors::a", DataError, "matrix"),
        ("cut.safetensors::x", DataError, "the file is cut"),
        ("cut.npy", DataError, "the file is cut"),
        ("objects.npy", DataError, "type that torch supports"),
        ("columns.npy", DataError, "ascontiguousarray"),
        ("flat.npy", DataError, "matrix"),
        ("x.csv", ConfigError, r"\.npy file or"),
    ],
)
def test_bad_files(name, error, message, tmp_path, put):
    data = {
        "good.safetensors": save({"x": matrix(9, 2), "a": torch.zeros(3)}),
        "cut.safetensors": save({"x": matrix(9, 2)})[:-1],
        "cut.npy": as_npy(matrix(9, 2))[:-1],
        "flat.npy": as_npy(torch.zeros(3)),
    }
    for file, content in (
        ("objects.npy", np.array([[{}]])),
        ("columns.npy", np.asfortranarray(np.zeros((3, 2)))),
    ):
        np.save(tmp_path / file, content)
        data[file] = (tmp_path / file).read_bytes()
    for file, content in data.items():
        (tmp_path / file).write_bytes(content)
        put(file, content)
    for where in (f"{tmp_path}/{name}", f"memory://features/{name}"):
        with pytest.raises(error, match=message):
            FeatureStore(node=where)


def test_an_unknown_protocol():
    with pytest.raises(ConfigError, match="nowhere"):
        FeatureStore(node="nowhere://x.npy")


def test_a_remote_file_cut_after_opening(put):
    x = matrix(50, 4)
    remote = open_matrix(put("later.npy", as_npy(x)), whole_bytes=0)
    assert isinstance(remote, RemoteMatrix)
    put("later.npy", as_npy(x)[:-8])
    with pytest.raises(DataError, match="replaced or cut"):
        remote.gather(torch.tensor([49]))


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "F8_E5M2", 3, None]),
        "shape": st.lists(st.integers(-2, 5) | st.none() | st.just(2**62), max_size=3),
        "data_offsets": st.lists(st.integers(-9, 99) | st.just("a"), max_size=3),
    }
)


@given(
    header=st.dictionaries(
        st.sampled_from(["x", "__metadata__"]), ENTRY | st.none() | st.integers()
    )
    | st.lists(st.integers())
    | st.binary(max_size=40),
    length=st.integers(-9, 9) | st.just(2**63),
    body=st.binary(max_size=100),
)
def test_hostile_headers_are_data_errors(header, length, body):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = max(0, len(header) + length)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/hostile.safetensors", length.to_bytes(8, "little") + header + body)
    fs.pipe_file("/hostile.npy", b"\x93NUMPY\x01\x00" + header + body)
    for name in ("hostile.safetensors::x", "hostile.npy"):
        try:
            store = FeatureStore(node=f"memory://{name}")
        except DataError:
            continue
        rows = store.gather("node", torch.arange(store.num_nodes))
        assert rows.shape == (store.num_nodes, store.node_dim)
