import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from bytecheckpoint.storage.files import data_file
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import BLOCK_BYTES, ChunkTable
from shared.errors import DataError
from shared.topology import Box

DTYPES = [
    "float64",
    "complex128",
    "float32",
    "bfloat16",
    "bool",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
]
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def chunk_lists(draw):
    """Chunks of different tensors, numbers of few and many digits."""
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        ndim = draw(st.integers(0, 3))
        offsets = draw(st.tuples(*[st.integers(0, 10**12)] * ndim))
        sizes = draw(st.tuples(*[st.sampled_from([1, 2, 9, 10, 11, 99, 100, 12345])] * ndim))
        found.append((name, draw(st.sampled_from(DTYPES)), Box(offsets, sizes)))
    return found


def entries_of(header: bytes) -> dict:
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    return json.loads(header[8:])


def file_of(chunks: list[tuple[str, torch.Tensor, Box]]) -> bytes:
    header = data_file.encode_header((name, str(t.dtype)[6:], box) for name, t, box in chunks)
    data = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for _, t, _ in chunks)
    file = data_file.size_file("rank-00000.safetensors", len(header) + len(data))
    return header + data + bytes(range(1, 9)) * ((file.num_bytes - file.hashed_bytes) // 8)


@given(chunk_lists())
def test_lengths_of_entries_are_known_without_making_them(chunks):
    names, dtypes, boxes = zip(*chunks, strict=True) if chunks else ((), (), ())
    ndim = max((len(box.sizes) for box in boxes), default=0)
    num_bytes = [b.numel * parse_dtype(t).itemsize for b, t in zip(boxes, dtypes, strict=True)]
    end = np.cumsum([0, *num_bytes])[1:]
    lengths = data_file.count_entry_bytes(
        names,
        dtypes,
        [len(box.sizes) for box in boxes],
        ChunkTable(
            np.arange(len(boxes), dtype=np.int32),
            np.array(
                [(*b.offsets, *(0,) * (ndim - len(b.offsets))) for b in boxes], dtype=np.int64
            ).reshape(len(boxes), ndim),
            np.array(
                [(*b.sizes, *(1,) * (ndim - len(b.sizes))) for b in boxes], dtype=np.int64
            ).reshape(len(boxes), ndim),
        ),
        end - np.array(num_bytes, dtype=np.int64),
        end,
    )
    header = data_file.encode_header(chunks)
    assert 1 + lengths.sum() == header.rindex(b'"__xxh3__"') - 8
    assert data_file.count_header_bytes(int(lengths.sum())) == len(header)


@given(chunk_lists())
def test_header_says_what_lies_where(chunks):
    header = data_file.encode_header(chunks)
    assert len(header) % data_file.ALIGN_BYTES == 0
    entries = entries_of(header)
    assert list(entries)[-1] == data_file.TABLE_NAME
    position = 0
    for (name, dtype, box), (key, entry) in zip(chunks, entries.items(), strict=False):
        tensor, _, offsets = key.rpartition("@")
        assert tensor == name
        assert offsets == ",".join(map(str, box.offsets))
        begin, end = entry["data_offsets"]
        assert begin == position
        assert end - begin == box.numel * parse_dtype(dtype).itemsize
        position = end
    table = entries[data_file.TABLE_NAME]
    hashed = len(header) + position
    count = 8 * -(-hashed // BLOCK_BYTES)
    assert table == {"dtype": "U8", "shape": [count], "data_offsets": [position, position + count]}
    assert data_file.size_file("x", hashed).num_bytes == hashed + count


def test_safetensors_reads_the_file():
    chunks = [
        ("c", torch.randn(3, dtype=torch.complex64), Box((7,), (3,))),
        ("model.w", torch.randn(4, 5), Box((0, 10), (4, 5))),
        ("model.w", torch.randn(2, 5), Box((4, 10), (2, 5))),
        ("step", torch.tensor(3.0), Box((), ())),
        ("half", torch.randn(3).bfloat16(), Box((0,), (3,))),
        ("odd", torch.arange(5, dtype=torch.uint8), Box((1,), (5,))),
        ("new", torch.randn(2, 2).to(torch.float8_e4m3fnuz), Box((0, 0), (2, 2))),
    ]
    found = load(file_of(chunks))
    assert torch.equal(found["model.w@0,10"], chunks[1][1])
    assert torch.equal(found["model.w@4,10"], chunks[2][1])
    assert torch.equal(found["step@"], torch.tensor(3.0))
    assert torch.equal(found["half@0"], chunks[4][1])
    assert torch.equal(found["odd@1"], chunks[5][1])
    # Types without a name are there as bytes, in a further dimension.
    assert torch.equal(found["c@7"].view(torch.complex64).view(3), chunks[0][1])
    assert found["new@0,0"].shape == (2, 2, 1)
    assert found[data_file.TABLE_NAME].tolist() == list(range(1, 9))
    assert len(found) == len(chunks) + 1


def test_header_larger_than_readers_take():
    few = [(f"tensor.{at}", "float32", Box((0,), (1,))) for at in range(50)]
    assert len(data_file.encode_header(few, max_bytes=8192)) == 4096
    with pytest.raises(DataError, match="500 chunks in one file"):
        data_file.encode_header(few * 10, max_bytes=8192)
