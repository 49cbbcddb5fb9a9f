"""Folders of torch.distributed.checkpoint, read in place by byte ranges.

A folder holds `.metadata`, a pickle that maps boxes of tensors to parts of `.distcp` files; each
part is an archive of torch.save. torch reads a whole part to get a slice of it. This reader reads
every archive's directory once to build an index of byte ranges, so that slices are read as slices.
No pickle is executed (see `pickles`).
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from bytecheckpoint.formats.archive import Archive
from bytecheckpoint.formats.pickles import (
    Metadata,
    StoredTensor,
    compute_strides,
    load_metadata,
    load_tree,
)
from bytecheckpoint.formats.ranges import Chunk, Window, build_index, join_path
from bytecheckpoint.formats.tree import Path, encode, nest
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.index import File, Index, check_file_name
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = [
    "METADATA_NAME",
    "ByteRange",
    "Folder",
    "load_entry",
    "locate_elements",
    "read_folder",
    "read_index",
    "read_paths",
]

METADATA_NAME = ".metadata"
_NUM_THREADS = 8
_MAX_DEPTH = 100
_log = logging.getLogger(__name__)


class ByteRange(NamedTuple):
    """A range of a file's bytes.

    Attributes:
        file: its name.
        start: offset of its first byte.
        num_bytes: its length.
    """

    file: str
    start: int
    num_bytes: int


class Folder(NamedTuple):
    """The content of a DCP folder.

    Attributes:
        index: index of its tensors.
        entries: byte ranges of the non-tensor values by name, each a file of torch.save.
        paths: paths of the names in the nested state, None if the folder does not record them.
    """

    index: Index
    entries: dict[str, ByteRange]
    paths: dict[str, Path] | None


def read_index(
    storage: Storage, path: str, *, trust_pickle: bool = False
) -> tuple[Index, dict[str, Any]]:
    """Reads a DCP folder.

    Args:
        storage: storage that holds it.
        path: path of the folder.
        trust_pickle: also unpickle values that torch.load(weights_only=True) refuses, which runs
            the code that they name. Without it such values are left out, with a warning.

    Returns:
        The index, and the tree of everything else (see `bytecheckpoint.state.values`).

    Raises:
        DataError: the folder is damaged, incomplete, or of a kind that cannot be read by ranges.
    """
    folder = read_folder(storage, path, trust_pickle=trust_pickle)
    tensors = [*folder.index.names, *folder.index.aliases]
    leaves: dict[str, Any] = {name: {"$tensor": name} for name in tensors}
    for name, part in folder.entries.items():
        try:
            value = load_entry(storage, path, name, part, trust_pickle=trust_pickle)
            leaves[name] = encode(value, name)
        except DataError as error:
            _log.warning("left out: %s", error)
    return folder.index, nest(leaves, folder.paths or {})


def read_folder(storage: Storage, path: str, *, trust_pickle: bool = False) -> Folder:
    """Finds the byte ranges of everything in a DCP folder; reads no values.

    Raises:
        DataError: as `read_index`.
    """
    where = join_path(path, METADATA_NAME)
    metadata = load_metadata(storage.read(where), where, trust_pickle=trust_pickle)
    try:
        tensors, boxes, others = _describe_contents(metadata)
        parts = _list_ranges(metadata, where)
        paths = read_paths(metadata)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{where}: expected the metadata of DCP, {error}") from error
    entries = {}
    for name in others:
        if (name, None) not in parts:
            raise DataError(
                f"{where}: expected a place of {name!r}, got none; it is damaged: fetch the "
                f"folder again"
            )
        entries[name] = parts[name, None]
    lying: dict[str, list[tuple[Box, ByteRange]]] = {name: [] for name in tensors}
    for name, box in boxes:
        if (name, box.offsets) not in parts:
            raise DataError(
                f"{where}: expected a place of {name!r} at {list(box.offsets)}, got none; it is "
                f"damaged: fetch the folder again"
            )
        lying[name].append((box, parts[name, box.offsets]))
    aliases = _find_aliases(lying, tensors)
    by_file: dict[str, list[tuple[str, Box, ByteRange]]] = {}
    for part in entries.values():
        by_file.setdefault(part.file, [])
    for name, found in lying.items():
        for box, part in found if name not in aliases else ():
            by_file.setdefault(part.file, []).append((name, box, part))
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        scans = list(
            threads.map(lambda file: _scan(storage, path, file, by_file[file], tensors), by_file)
        )
    sizes = {file: num_bytes for file, (num_bytes, _) in zip(by_file, scans, strict=True)}
    files = [File(*item) for item in sizes.items()]
    for name, part in entries.items():
        if part.start + part.num_bytes > sizes[part.file]:
            raise DataError(
                f"{join_path(path, part.file)}: expected the file to hold all of {name!r}, but "
                f"it is cut off; fetch it again"
            )
    chunks = [chunk for _, found in scans for chunk in found]
    stored = {name: described for name, described in tensors.items() if name not in aliases}
    return Folder(build_index(stored, chunks, files, where, aliases), entries, paths)


def load_entry(
    storage: Storage, path: str, name: str, part: ByteRange, *, trust_pickle: bool = False
) -> Any:
    """Reads a non-tensor value.

    Raises:
        DataError: it holds objects that torch.load(weights_only=True) refuses, or is damaged.
    """
    buffer = bytearray(part.num_bytes)
    storage.read_into(join_path(path, part.file), part.start, memoryview(buffer))
    try:
        return torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=not trust_pickle)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "damaged")
        raise DataError(
            f"{join_path(path, part.file)}: the value {name!r} was refused: {why}; "
            f"trust_pickle=True lets its code run, if you trust its source"
        ) from error


def _describe_contents(
    metadata: Metadata,
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], list[tuple[str, Box]], list[str]]:
    """Types and shapes of tensors, boxes of their chunks, and names of other values."""
    tensors, boxes, others = {}, [], []
    for name, found in vars(metadata)["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise TypeError(f"a name that is no text: {name!r}")
        if type(found).__name__ == "BytesStorageMetadata":
            others.append(name)
            continue
        dtype = found.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"no element type for {name!r}")
        shape = _check_whole_numbers(found.size)
        tensors[name] = (dtype, shape)
        known = set()
        for chunk in found.chunks:
            box = Box(_check_whole_numbers(chunk.offsets), _check_whole_numbers(chunk.sizes))
            if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
                raise ValueError(f"a chunk of {name!r} has other dimensions than the tensor")
            if box.numel and box not in known:
                known.add(box)
                boxes.append((name, box))
    return tensors, boxes, others


def _find_aliases(
    lying: Mapping[str, list[tuple[Box, ByteRange]]], described: Mapping[str, tuple]
) -> dict[str, str]:
    """Names of tensors that share the bytes of another tensor, with the other's name."""
    first: dict[tuple, str] = {}
    aliases = {}
    for name, found in lying.items():
        if found:
            stored = first.setdefault((described[name], *sorted(found)), name)
            if stored != name:
                aliases[name] = stored
    return aliases


def _list_ranges(
    metadata: Metadata, where: str
) -> dict[tuple[str, tuple[int, ...] | None], ByteRange]:
    parts = {}
    for item, info in vars(metadata)["storage_data"].items():
        if getattr(info, "transform_descriptors", None):
            raise DataError(
                f"{where}: {item.fqn!r} was written through extensions "
                f"{info.transform_descriptors}, which only torch reads; load it with torch and "
                f"save it again"
            )
        # A value that is no tensor has no offset, and DCP pickles none for it.
        offset = getattr(item, "offset", None)
        offset = None if offset is None else _check_whole_numbers(offset)
        start, num_bytes = _check_whole_numbers((info.offset, info.length))
        parts[item.fqn, offset] = ByteRange(
            check_file_name(info.relative_path, where), start, num_bytes
        )
    return parts


def read_paths(metadata: object) -> dict[str, Path] | None:
    """Reads the paths of flat names, as torch's default planner leaves them in a `Metadata`."""
    data = getattr(metadata, "planner_data", None)
    if not isinstance(data, dict):
        return None
    return {
        name: path
        for name, path in data.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and 0 < len(path) <= _MAX_DEPTH
        and all(isinstance(key, str | int) for key in path)
    }


def _check_whole_numbers(numbers: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(numbers)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"{numbers!r:.80} are no sizes")
    return numbers


def _scan(
    storage: Storage,
    path: str,
    file: str,
    wanted: list[tuple[str, Box, ByteRange]],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[int, list[Chunk]]:
    """Size of a file, and the offset of each chunk's elements in it."""
    window = Window(storage, join_path(path, file))
    chunks = []
    for name, box, part in sorted(wanted, key=lambda one: one[2].start):
        where = f"{join_path(path, file)} at {part.start}, tensor {name!r}"
        # Read the beginning first: the window with the end of the previous archive contains it.
        window.read(part.start, min(part.num_bytes, 1024))
        archive = Archive(window.read, part.start, part.num_bytes, where)
        stored = load_tree(archive.read("data.pkl"), where)
        if not isinstance(stored, StoredTensor):
            raise DataError(f"{where}: expected a tensor, got a {type(stored).__name__}")
        if (stored.dtype, stored.shape) != (tensors[name][0], box.sizes):
            raise DataError(
                f"{where}: expected {tensors[name][0]} of shape {list(box.sizes)}, got "
                f"{stored.dtype} of {list(stored.shape)}; .metadata belongs to another save"
            )
        chunks.append(Chunk(name, box, file, locate_elements(archive, stored, where)))
    return window.num_bytes, chunks


def locate_elements(archive: Archive, stored: StoredTensor, where: str) -> int:
    """Finds the byte offset of a tensor's first element in the archive's file.

    Raises:
        DataError: the elements are not stored in row-major order, or not completely.
    """
    if "byteorder" in archive.names and archive.read("byteorder") != b"little":
        raise DataError(
            f"{where}: expected little-endian elements, got big-endian ones; save it again with "
            f"torch on a little-endian machine"
        )
    steps = zip(stored.shape, stored.strides, compute_strides(stored.shape), strict=True)
    if not stored.is_plain or any(size > 1 and step != flat for size, step, flat in steps):
        raise DataError(
            f"{where}: expected elements in row-major order, got strides {list(stored.strides)} "
            f"for shape {list(stored.shape)}, or a lazy conjugate; load it with torch and save "
            f"`tensor.resolve_conj().contiguous()`"
        )
    numel = 1
    for size in stored.shape:
        numel *= size
    record = archive.locate(f"data/{stored.key}")
    begin = stored.offset * stored.dtype.itemsize
    if begin + numel * stored.dtype.itemsize > min(record.num_bytes, stored.storage_bytes):
        raise DataError(
            f"{where}: expected a storage of at least the tensor's size, got a smaller one; the "
            f"file is damaged: fetch it again"
        )
    return record.start + begin
