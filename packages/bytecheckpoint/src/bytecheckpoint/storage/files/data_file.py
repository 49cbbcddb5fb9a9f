"""The layout of a data file: a strict safetensors file whose last tensor is its own checksums.

Any safetensors tool opens one. Tensors are chunks, named `<name>@<first index in each dimension>`;
they lie in the order of their item size, so that each is aligned without gaps, and begin at a
multiple of 4096 bytes, so that they can be written past the page cache. The last tensor, `__xxh3__`,
holds a checksum for each block of all bytes before it, the header's included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from bytecheckpoint.storage.files.dtypes import get_safetensors_name, parse_dtype
from bytecheckpoint.storage.files.index import ChunkTable, File, count_blocks
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = [
    "ALIGN_BYTES",
    "TABLE_NAME",
    "count_entry_bytes",
    "count_header_bytes",
    "encode_header",
    "size_file",
]

ALIGN_BYTES = 4096
TABLE_NAME = "__xxh3__"

# The table's entry contains the number of blocks, which depends on the header: room for any number.
_MAX_TABLE_ENTRY_BYTES = 128
# The largest header in bytes that safetensors readers accept.
_MAX_HEADER_BYTES = 100_000_000

_Bytes = TypeVar("_Bytes", int, np.ndarray)


def count_header_bytes(entries_bytes: _Bytes) -> _Bytes:
    """Where the data begin in a file whose entries, with their commas, take so many bytes."""
    return -(-(8 + entries_bytes + _MAX_TABLE_ENTRY_BYTES) // ALIGN_BYTES) * ALIGN_BYTES


def size_file(name: str, hashed_bytes: int) -> File:
    """A data file whose header and chunks take so many bytes; the table of checksums follows."""
    return File(name, hashed_bytes + 8 * count_blocks(hashed_bytes), hashed_bytes)


def encode_header(
    entries: Iterable[tuple[str, str, Box]], *, max_bytes: int = _MAX_HEADER_BYTES
) -> bytes:
    """The bytes of a file before its data.

    Args:
        entries: name of the tensor, torch's name of its element type, and the chunk's box, of each
            chunk in the order in which they follow one another in the file. No box is empty.
        max_bytes: the largest header that readers accept.

    Returns:
        The length, the JSON and spaces, a multiple of ALIGN_BYTES.

    Raises:
        DataError: the header of so many chunks exceeds `max_bytes`.
    """
    texts, position = [], 0
    for name, dtype, box in entries:
        end = position + box.numel * parse_dtype(dtype).itemsize
        texts.append(_encode_entry(name, dtype, box, position, end))
        position = end
    body = b"".join(texts)
    data_start = count_header_bytes(len(body))
    if data_start > max_bytes:
        raise DataError(
            f"expected a header of at most {max_bytes} bytes, {len(texts)} chunks in one "
            f"file need {data_start}; let more ranks write, or join small tensors"
        )
    table = size_file("", data_start + position)
    end = table.num_bytes - data_start
    last = (
        f'"{TABLE_NAME}":{{"dtype":"U8","shape":[{end - position}],'
        f'"data_offsets":[{position},{end}]}}'
    )
    text = b"{" + body + last.encode() + b"}"
    return (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)


def _encode_entry(name: str, dtype: str, box: Box, begin: int, end: int) -> bytes:
    known = get_safetensors_name(parse_dtype(dtype))
    shape = box.sizes if known else (*box.sizes, parse_dtype(dtype).itemsize)
    key = msgspec.json.encode(f"{name}@{','.join(map(str, box.offsets))}")
    sizes = ",".join(map(str, shape))
    rest = f':{{"dtype":"{known or "U8"}","shape":[{sizes}],"data_offsets":[{begin},{end}]}},'
    return key + rest.encode()


def count_entry_bytes(
    names: Sequence[str],
    dtypes: Sequence[str],
    ndims: Sequence[int],
    chunks: ChunkTable,
    begin: np.ndarray,
    end: np.ndarray,
) -> np.ndarray:
    """Bytes of each chunk's entry with its comma, without making the entries.

    Args:
        names, dtypes, ndims: of the tensors: names, torch's names of types, numbers of dimensions.
        chunks: the boxes.
        begin, end: int64 [rows], first byte of each chunk in its file's data and the one after.

    Returns:
        int64 [rows].
    """
    # An entry at [0, 0, ...] of size [1, 1, ...] is as long as the shortest: a digit a number.
    tensors = zip(names, dtypes, ndims, strict=True)
    least = [len(_encode_entry(n, t, Box((0,) * d, (1,) * d), 0, 0)) for n, t, d in tensors]
    more = _count_more_digits(chunks.offsets).sum(axis=1) + _count_more_digits(chunks.sizes).sum(
        axis=1
    )
    more += _count_more_digits(begin) + _count_more_digits(end)
    return np.array(least, dtype=np.int64)[chunks.tensor] + more


def _count_more_digits(numbers: np.ndarray) -> np.ndarray:
    """How many decimal digits beyond the first."""
    return np.searchsorted(10 ** np.arange(1, 19), numbers, side="right")
