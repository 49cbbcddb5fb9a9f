"""Indices from hostile files are refused, or are sound."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.storage.files.index import ChunkTable, File, Index, count_blocks
from shared.errors import DataError
from shared.topology.boxes import Box


def index(shapes, cuts, hashed=True):
    """Tensors cut along their first dimension, one after another in two files."""
    names, rows, ends = [], [], [4096, 4096]
    for at, shape in enumerate(shapes):
        names.append(f"t{at}")
        edges = sorted({0, shape[0], *(cut % (shape[0] + 1) for cut in cuts)})
        for start, stop in pairwise(edges):
            file = len(rows) % 2
            size = (stop - start, *shape[1:])
            rows.append((at, (start, *(0 for _ in shape[1:])), size, file, ends[file]))
            ends[file] += 4 * int(np.prod(size))
    files = [
        File(f"f{at}", end + 8 * count_blocks(end), end) if hashed else File(f"f{at}", end)
        for at, end in enumerate(ends)
    ]
    ndim = max(map(len, shapes))
    offsets = np.zeros((len(rows), ndim), np.int64)
    sizes = np.ones((len(rows), ndim), np.int64)
    for at, (_, offset, size, _, _) in enumerate(rows):
        offsets[at, : len(offset)], sizes[at, : len(size)] = offset, size
    return Index(
        names=names,
        dtypes=["float32"] * len(names),
        shapes=[tuple(shape) for shape in shapes],
        chunks=ChunkTable(np.array([r[0] for r in rows], np.int32), offsets, sizes),
        file=np.array([r[3] for r in rows], np.int32),
        start=np.array([r[4] for r in rows], np.int64),
        files=files,
    )


def is_sound(found):
    """Each element of each tensor is in exactly one chunk, as readers look chunks up, and chunks
    lie in files apart from each other; by brute force."""
    spans = []
    for at, (name, shape) in enumerate(zip(found.names, found.shapes, strict=True)):
        if np.prod(shape, dtype=np.float64) > 1e5:
            return False
        seen = np.zeros(shape, np.int64)
        box = Box((0,) * len(shape), tuple(shape))
        for row, part in found.overlapping(name, box):
            assert found.chunks.tensor[row] == at
            seen[part.within(box)] += 1
            size = found.itemsizes[at] * int(np.prod(found.box(row).sizes))
            spans.append((int(found.file[row]), int(found.start[row]), int(size)))
        if (seen != 1).any():
            return False
    for file, start, size in spans:
        limit = found.files[file].hashed_bytes
        limit = found.files[file].num_bytes if limit is None else limit
        if start < 0 or start + size > limit:
            return False
    spans.sort()
    return all(one[0] != two[0] or one[1] + one[2] <= two[1] for one, two in pairwise(spans))


VALUES = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 4096, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
COLUMNS = {"tensor": "<i4", "offsets": "<i8", "sizes": "<i8", "file": "<i4", "start": "<i8"}


@given(data=st.data())
def test_an_edited_index_is_refused_or_still_sound(data):
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    valid = index(shapes, data.draw(st.lists(st.integers(0, 5), max_size=3)))
    assert is_sound(Index.decode(valid.encode()))
    stored = msgspec.msgpack.decode(valid.encode())
    offsets = stored["offsets"]
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from([*COLUMNS, "row", "shapes", "files", "ndim", "dtypes"]))
        if kind in COLUMNS:
            column = np.frombuffer(stored[kind], COLUMNS[kind]).copy()
            if len(column):
                at = data.draw(st.integers(0, len(column) - 1))
                value = data.draw(
                    VALUES | st.just(int(column[at]) + 1) | st.just(int(column[at]) - 4)
                )
                # Below the smallest number the largest one follows.
                wrapped = np.array([value % 2**64], np.uint64).view(np.int64)
                column[at : at + 1] = wrapped.astype(COLUMNS[kind])
                stored[kind] = column.tobytes()
        elif kind == "row" and len(stored["tensor"]) and stored["offsets"] == offsets:
            # A row twice, once with an empty side.
            num_rows = len(stored["tensor"]) // 4
            for name, dtype in COLUMNS.items():
                column = np.frombuffer(stored[name], dtype)
                column = column.reshape(num_rows, -1)
                row = column[:1].copy()
                if name == "sizes" and column.shape[1]:
                    row[0, -1] = data.draw(st.integers(0, 1))
                stored[name] = np.concatenate([row, column]).tobytes()
            break
        elif kind == "shapes":
            at = data.draw(st.integers(0, len(stored["shapes"]) - 1))
            stored["shapes"][at] = data.draw(st.lists(VALUES.filter(lambda v: v >= -1), max_size=4))
        elif kind == "files":
            at = data.draw(st.integers(0, 1))
            stored["files"][at][data.draw(st.integers(1, 2))] = data.draw(VALUES)
        elif kind == "ndim":
            stored["ndim"] = data.draw(VALUES)
        else:
            stored["dtypes"][0] = data.draw(st.sampled_from(["float64", "uint8", "quint8", ""]))
    try:
        found = Index.decode(msgspec.msgpack.encode(stored))
    except DataError:
        return
    assert is_sound(found)


@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_are_no_index(content):
    with pytest.raises(DataError):
        Index.decode(content)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "",
        ".",
        "..",
        "a//b",
        "a/",
        ".hidden",
        "a\\b",
        "a\0",
        "x\n",
        "~/x",
    ],
)
def test_file_names_that_lead_elsewhere_are_refused(name):
    valid = msgspec.msgpack.decode(index([(4,)], []).encode())
    valid["files"][0][0] = name
    with pytest.raises(DataError, match="plain name"):
        Index.decode(msgspec.msgpack.encode(valid))


@pytest.mark.parametrize(
    ("alias", "target", "reason"),
    [("t9", "gone", "'gone', which is not stored"), ("t1", "t0", "'t0', but is stored itself")],
)
def test_names_tied_in_vain_are_refused(alias, target, reason):
    valid = msgspec.msgpack.decode(index([(4,), (2,)], []).encode())
    valid["aliases"] = {alias: target}
    with pytest.raises(DataError, match=f"'{alias}' is tied to {reason}"):
        Index.decode(msgspec.msgpack.encode(valid))


def test_a_chunk_that_is_empty_only_beyond_the_tensors_dimensions_is_refused():
    """It has no elements to count, but a reader who leaves out the padding would read it."""
    one = index([(4,), (2, 2)], [])
    tensor, offsets, sizes = one.chunks.tensor, one.chunks.offsets, one.chunks.sizes
    hostile = Index(
        names=one.names,
        dtypes=one.dtypes,
        shapes=one.shapes,
        chunks=ChunkTable(
            np.concatenate([tensor[:1], tensor]),
            np.concatenate([offsets[:1], offsets]),
            np.concatenate([[[4, 0]], sizes]),
        ),
        file=np.concatenate([one.file[:1], one.file]),
        start=np.concatenate([[2**60], one.start]),
        files=one.files,
    )
    with pytest.raises(DataError):
        Index.decode(hostile.encode())
