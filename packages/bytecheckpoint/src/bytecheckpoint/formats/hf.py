"""Folders of safetensors files as Hugging Face lays them out, read in place.

`model.safetensors.index.json` says which file holds which tensor; without it a folder's files are
read together. Files that torch.distributed.checkpoint's HuggingFaceStorageWriter left unmerged hold
pieces of tensors, and say in their headers where each piece begins.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from bytecheckpoint.formats.ranges import Chunk, Window, build_index, join_path
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.dtypes import SAFETENSORS_NAMES
from bytecheckpoint.storage.files.index import File, Index, check_file_name
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["INDEX_NAME", "read_folder", "read_index"]

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_MAX_HEADER_BYTES = 100_000_000
_NUM_THREADS = 8
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class _Header(NamedTuple):
    """A file's header; starts are offsets in the file, pieces boxes of tensors."""

    num_bytes: int
    pieces: dict[str, tuple[torch.dtype, Box, int]]
    is_sharded: bool
    metadata: dict[str, str]


def read_index(storage: Storage, path: str) -> Index:
    """Reads the headers of a folder's safetensors files.

    Args:
        storage: storage that holds it.
        path: path of the folder.

    Raises:
        DataError: a file is missing or damaged, or two files hold the same tensor.
    """
    where, weight_map = _read_weight_map(storage, path)
    files = sorted(set(weight_map.values())) if weight_map else _list_lone_files(storage, path)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        headers = dict(
            zip(files, threads.map(lambda f: _read_header(storage, path, f), files), strict=True)
        )
    for name, file in weight_map.items():
        if name not in headers[file].pieces:
            raise DataError(
                f"{where}: expected {name!r} in {file}, which does not hold it; fetch the whole "
                f"folder"
            )
    dtypes: dict[str, torch.dtype] = {}
    ends: dict[str, tuple[int, ...]] = {}
    chunks = []
    for file, header in headers.items():
        for name, (dtype, box, start) in header.pieces.items():
            if weight_map.get(name, file) != file:
                continue
            end = tuple(map(sum, zip(*box, strict=True)))
            known = ends.get(name)
            if known is not None and not header.is_sharded:
                raise DataError(
                    f"{join_path(path, file)}: expected {name!r} in one file of the folder, got "
                    f"it in another too; keep one set of weights in it, or an {INDEX_NAME}"
                )
            if known is not None and (len(known) != len(end) or dtypes[name] != dtype):
                raise DataError(
                    f"{join_path(path, file)}: expected {name!r} to be {dtypes[name]} of "
                    f"{len(known)} dimensions as in another file, got {dtype} of {len(end)}; the "
                    f"files are of two saves: keep those of one"
                )
            dtypes[name] = dtype
            ends[name] = end if known is None else tuple(map(max, known, end))
            chunks.append(Chunk(name, box, file, start))
    aliases = {
        alias: name
        for header in headers.values()
        for alias, name in header.metadata.items()
        if name in dtypes and alias not in dtypes
    }
    tensors = {name: (dtype, ends[name]) for name, dtype in dtypes.items()}
    sizes = [File(file, header.num_bytes) for file, header in headers.items()]
    return build_index(tensors, chunks, sizes, where, aliases)


def read_folder(storage: Storage, path: str) -> tuple[Index, None]:
    """Returns the index of `read_index`, and None, because there are no non-tensor values."""
    return read_index(storage, path), None


def _read_weight_map(storage: Storage, path: str) -> tuple[str, dict[str, str]]:
    """The index file's path (without one the folder's, for errors), and the file of each tensor."""
    found = [name for name in storage.list(path) if name.endswith(f"{_SUFFIX}.index.json")]
    if not found:
        return join_path(path, f"*{_SUFFIX}"), {}
    if INDEX_NAME not in found and len(found) > 1:
        raise DataError(
            f"{path}: expected one index, found {', '.join(found)}; keep that of one variant"
        )
    where = join_path(path, INDEX_NAME if INDEX_NAME in found else found[0])
    try:
        weight_map = json.loads(storage.read(where))["weight_map"].items()
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON with a weight_map, {error}") from error
    return where, {str(name): check_file_name(file, where) for name, file in weight_map}


def _list_lone_files(storage: Storage, path: str) -> list[str]:
    files = [name for name in storage.list(path) if name.endswith(_SUFFIX)]
    if not files:
        raise DataError(f"{path}: expected files *{_SUFFIX}, found none")
    # Some repositories keep the same weights in a second layout.
    return ["model.safetensors"] if "model.safetensors" in files else files


def _read_header(storage: Storage, path: str, file: str) -> _Header:
    where = join_path(path, check_file_name(file, path))
    window = Window(storage, where)
    length = int.from_bytes(window.read(0, 8), "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise DataError(f"{where}: expected a safetensors header, got one of {length} bytes")
    text = window.read(8, length)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        sharding = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        pieces = {
            name: _read_piece(entry, sharding.get(name), 8 + length)
            for name, entry in entries.items()
        }
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: expected a safetensors header, {error}; damaged") from error
    return _Header(window.num_bytes, pieces, bool(sharding), metadata)


def _read_piece(
    entry: dict[str, Any], sharding: dict[str, Any] | None, data_start: int
) -> tuple[torch.dtype, Box, int]:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"elements of type {entry['dtype']!r} are not known")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    offsets = tuple(sharding["saved_offsets"]) if sharding else (0,) * len(shape)
    begin, end = entry["data_offsets"]
    numbers = (*shape, *offsets, begin, end)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("sizes are no whole numbers")
    if len(offsets) != len(shape) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {list(shape)} does not fit {end - begin} bytes")
    return dtype, Box(offsets, shape), data_start + begin
