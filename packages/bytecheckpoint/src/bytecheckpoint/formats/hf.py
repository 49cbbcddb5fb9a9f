"""Folders of safetensors files as Hugging Face lays them out: read in place, and written.

`model.safetensors.index.json` says which file holds which tensor; without it a folder's files are
read together. Files that torch.distributed.checkpoint's HuggingFaceStorageWriter left unmerged hold
pieces of tensors, and say in their headers where each piece begins.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bytecheckpoint.formats.ranges import Chunk, Window, build_index, joined
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.dtypes import SAFETENSORS_NAMES, dtype_named, safetensors_name
from bytecheckpoint.storage.files.index import File, Index, plain_name
from bytecheckpoint.tools.writers.output import appearing, data_of, slabs
from shared.errors import DataError
from shared.topology.boxes import Box

if TYPE_CHECKING:
    from bytecheckpoint.loading.checkpoint import Checkpoint

__all__ = ["INDEX_NAME", "read_index", "write_hf"]

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_MAX_HEADER_BYTES = 100_000_000
_NUM_THREADS = 8
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class _Header(NamedTuple):
    """What a file says of itself; starts are offsets in the file, pieces boxes of tensors."""

    num_bytes: int
    pieces: dict[str, tuple[torch.dtype, Box, int]]
    is_sharded: bool
    metadata: dict[str, str]


def read_index(storage: Storage, path: str) -> Index:
    """Reads the headers of a folder's safetensors files.

    Args:
        storage: where it lies.
        path: of the folder.

    Raises:
        DataError: a file is missing, damaged or claims another's tensors.
    """
    where, weight_map = _weight_map(storage, path)
    files = sorted(set(weight_map.values())) if weight_map else _lone_files(storage, path)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        headers = dict(
            zip(files, threads.map(lambda f: _read_header(storage, path, f), files), strict=True)
        )
    for name, file in weight_map.items():
        if name not in headers[file].pieces:
            raise DataError(f"{where}: says that {name!r} lies in {file}, which does not hold it")
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
                    f"{joined(path, file)}: {name!r} stands in another file of the folder too; "
                    f"keep one set of weights in it, or an {INDEX_NAME}"
                )
            if known is not None and (len(known) != len(end) or dtypes[name] != dtype):
                raise DataError(
                    f"{joined(path, file)}: {name!r} is {dtype} of {len(end)} dimensions here, in "
                    f"another file {dtypes[name]} of {len(known)}; the files are of two saves"
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


def _weight_map(storage: Storage, path: str) -> tuple[str, dict[str, str]]:
    """The index file, or what stands for it in errors, and the file of each tensor."""
    found = [name for name in storage.list(path) if name.endswith(f"{_SUFFIX}.index.json")]
    if not found:
        return joined(path, f"*{_SUFFIX}"), {}
    if INDEX_NAME not in found and len(found) > 1:
        raise DataError(
            f"{path}: expected one index, found {', '.join(found)}; keep that of one variant"
        )
    where = joined(path, INDEX_NAME if INDEX_NAME in found else found[0])
    try:
        weight_map = json.loads(storage.read(where))["weight_map"].items()
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON with a weight_map, {error}") from error
    return where, {str(name): plain_name(file, where) for name, file in weight_map}


def _lone_files(storage: Storage, path: str) -> list[str]:
    files = [name for name in storage.list(path) if name.endswith(_SUFFIX)]
    if not files:
        raise DataError(f"{path}: expected files *{_SUFFIX}, found none")
    # Beside the weights some repositories keep another layout of the same.
    return ["model.safetensors"] if "model.safetensors" in files else files


def _read_header(storage: Storage, path: str, file: str) -> _Header:
    where = joined(path, plain_name(file, path))
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
            name: _piece(entry, sharding.get(name), 8 + length) for name, entry in entries.items()
        }
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: expected a safetensors header, {error}; damaged") from error
    return _Header(window.num_bytes, pieces, bool(sharding), metadata)


def _piece(
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


def write_hf(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 1000**3,
    prefix: str = "model.",
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a model's weights as safetensors files, in the layout of `save_pretrained`.

    Args:
        checkpoint: the source.
        folder: made here; appears when it is whole and on disk.
        max_shard_bytes: no file has more bytes of tensors, unless a single one is larger.
        prefix: which tensors are written, and what is cut from their names.
        progress: told the bytes written since it was last told.

    Raises:
        ConfigError: the folder exists.
        DataError: no name begins with the prefix, or safetensors has no name for a type.
    """
    index = checkpoint.index
    names = [name for name in index.names if name.startswith(prefix)]
    if not names:
        raise DataError(
            f"expected tensors with names that begin with {prefix!r}, got "
            f"{', '.join(index.names[:3])}, ...; pass the prefix of the model's names"
        )
    shards = _grouped(index, names, max_shard_bytes)
    metadata = {"format": "pt"}
    for alias, name in index.aliases.items():
        if alias.startswith(prefix) and name.startswith(prefix):
            metadata[alias.removeprefix(prefix)] = name.removeprefix(prefix)
    weight_map = {}
    with appearing(Path(folder)) as making:
        making.mkdir()
        for at, shard in enumerate(shards, 1):
            file_name = f"model-{at:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                file_name = "model.safetensors"
            with (making / file_name).open("wb") as file:
                _write_file(file, checkpoint, shard, prefix, metadata, progress)
            weight_map.update((name.removeprefix(prefix), file_name) for name in shard)
        if len(shards) > 1:
            total = sum(_num_bytes(index, name) for name in names)
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (making / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")


def _num_bytes(index: Index, name: str) -> int:
    at = index.position[name]
    return math.prod(index.shapes[at]) * int(index.itemsizes[at])


def _grouped(index: Index, names: list[str], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name in names:
        num_bytes = _num_bytes(index, name)
        if held and held + num_bytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += num_bytes
    return shards


def _write_file(
    file: BufferedIOBase,
    checkpoint: Checkpoint,
    names: Iterable[str],
    prefix: str,
    metadata: dict[str, str],
    progress: Callable[[int], None] | None,
) -> None:
    index = checkpoint.index
    # Larger elements first, so that each tensor is aligned without gaps.
    names = sorted(names, key=lambda name: -int(index.itemsizes[index.position[name]]))
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        at = index.position[name]
        dtype = safetensors_name(dtype_named(index.dtypes[at]))
        if dtype is None:
            raise DataError(
                f"{name}: safetensors has no name for {index.dtypes[at]}; write DCP or torch files"
            )
        begin, end = end, end + _num_bytes(index, name)
        entries[name.removeprefix(prefix)] = {
            "dtype": dtype,
            "shape": list(index.shapes[at]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        at = index.position[name]
        whole = Box((0,) * len(index.shapes[at]), index.shapes[at])
        for box in slabs(whole, int(index.itemsizes[at])):
            file.write(data_of(checkpoint.read(name, box)))
            if progress is not None:
                progress(box.numel * int(index.itemsizes[at]))
