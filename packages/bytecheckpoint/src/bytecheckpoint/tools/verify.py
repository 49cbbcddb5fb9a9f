"""Lists the damage in a checkpoint; changes nothing and raises nothing.

Without `deep` it checks the manifest, the index, the file of extra values, and every data file's
size, header and checksum table; with `deep` every byte. Loading always checks the blocks it reads;
this finds damage in all blocks, before they are needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from bytecheckpoint.loading.source import open_source
from bytecheckpoint.state.values import parse
from bytecheckpoint.storage import Storage, open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.index import BLOCK_BYTES, Index
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME, FileRecord, Manifest
from shared.errors import DataError

__all__ = ["Damage", "verify"]

_UNIT_BYTES = 64 * BLOCK_BYTES
_NUM_THREADS = 4


class Damage(NamedTuple):
    """One damaged file or block.

    Attributes:
        file: its path under the checkpoint's folder.
        what: description of the damage.
        block: number of the damaged 256 KiB block of the file, from 0; None: the whole file.
        tensors: names of tensors with elements in it, if the index can be read.
    """

    file: str
    what: str
    block: int | None = None
    tensors: tuple[str, ...] = ()


def verify(
    url: str, *, deep: bool = False, progress: Callable[[int], None] | None = None
) -> list[Damage]:
    """Lists the damage in a checkpoint.

    Args:
        url: URL of one checkpoint's folder.
        deep: read every byte and compare it with its checksum.
        progress: called with the number of bytes read from data files since its last call, from any
            thread.

    Returns:
        Nothing if the checkpoint is whole, as far as was looked. Folders of other formats have no
        checksums: of those only the structure is looked at.
    """
    storage = open_storage(url)
    try:
        if MANIFEST_NAME not in storage.list(""):
            open_source(storage, "")
            return []
        manifest = commit.read_manifest(storage, "")
    except (DataError, OSError) as error:
        return [Damage(MANIFEST_NAME, str(error))]
    found: list[Damage] = []
    index = None
    try:
        index = commit.read_index(storage, "", manifest)
    except (DataError, OSError) as error:
        found.append(Damage(_path(manifest, manifest.index), str(error)))
    try:
        parse(commit.read_extra(storage, "", manifest), manifest.extra.name)
    except (DataError, OSError) as error:
        found.append(Damage(_path(manifest, manifest.extra), str(error)))
    for number in range(len(manifest.files)):
        damages, table = _check_file(storage, manifest, index, number)
        found += damages
        if deep and table is not None:
            look = _Look(storage, manifest, index, number, table)
            with ThreadPoolExecutor(_NUM_THREADS) as threads:
                for some, num_bytes in threads.map(look.unit, look.starts()):
                    found += some
                    if progress is not None:
                        progress(num_bytes)
    storage.close()
    return found


def _check_file(
    storage: Storage, manifest: Manifest, index: Index | None, number: int
) -> tuple[list[Damage], bytes | None]:
    """The damage of a data file outside its blocks, and its checksum table if that is intact."""
    file = manifest.files[number]
    path = _path(manifest, file)
    everything = _name_tensors(index, number, 0, file.num_bytes)
    try:
        size = storage.size(path)
        if size != file.num_bytes:
            what = f"expected {file.num_bytes} bytes, got {size}"
            return [Damage(path, what, None, everything)], None
        hashed = _count_hashed_bytes(file)
        table = bytearray(file.num_bytes - hashed)
        storage.read_into(path, hashed, memoryview(table))
        if xxhash.xxh3_128_hexdigest(table) != file.xxh3_128:
            what = "its table of checksums does not have the hash in the manifest"
            return [Damage(path, what, None, everything)], None
        wrong = None if index is None else _find_header_fault(storage, path, index, number)
    except FileNotFoundError:
        return [Damage(path, "missing", None, everything)], None
    except OSError as error:
        return [Damage(path, f"cannot be read: {error}", None, everything)], None
    return ([] if wrong is None else [Damage(path, wrong, 0)]), bytes(table)


def _find_header_fault(storage: Storage, path: str, index: Index, number: int) -> str | None:
    """How the file's own header contradicts the index."""
    limit = index.files[number].hashed_bytes or 0
    length = bytearray(8)
    storage.read_into(path, 0, memoryview(length))
    data_start = 8 + int.from_bytes(length, "little")
    if data_start > limit:
        return f"its header says that it is {data_start - 8} bytes long, in a file of {limit}"
    text = bytearray(data_start - 8)
    storage.read_into(path, 8, memoryview(text))
    try:
        entries = json.loads(bytes(text)).items()
        spans = {name: entry["data_offsets"] for name, entry in entries if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its header is not one of a safetensors file: {error!r:.100}"
    for row in np.flatnonzero((index.file == number) & (index.num_bytes > 0)).tolist():
        tensor = int(index.chunks.tensor[row])
        box = index.chunks.box(row, len(index.shapes[tensor]))
        name = f"{index.names[tensor]}@{','.join(map(str, box.offsets))}"
        start = int(index.start[row]) - data_start
        if spans.get(name) != [start, start + int(index.num_bytes[row])]:
            return f"its header has {name!r} at {spans.get(name)}, the index at byte {start}"
    return None


class _Look:
    """Compares a data file's blocks with its table."""

    def __init__(
        self, storage: Storage, manifest: Manifest, index: Index | None, number: int, table: bytes
    ) -> None:
        file = manifest.files[number]
        self._storage, self._path = storage, _path(manifest, file)
        self._index, self._number, self._table = index, number, table
        self._hashed = _count_hashed_bytes(file)

    def starts(self) -> range:
        """Where the units of one read begin."""
        return range(0, self._hashed, _UNIT_BYTES)

    def unit(self, start: int) -> tuple[list[Damage], int]:
        """The damaged blocks of a unit, and how many bytes it has."""
        data = memoryview(bytearray(min(_UNIT_BYTES, self._hashed - start)))
        try:
            self._storage.read_into(self._path, start, data)
        except OSError as error:
            what = f"bytes {start} to {start + len(data)} cannot be read: {error}"
            return [self._damage(start, len(data), what)], len(data)
        found = []
        for at in range(0, len(data), BLOCK_BYTES):
            block = (start + at) // BLOCK_BYTES
            content = data[at : at + BLOCK_BYTES]
            digest = xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")
            if digest != self._table[8 * block : 8 * block + 8]:
                what = f"bytes {start + at} to {start + at + len(content)} changed"
                found.append(self._damage(start + at, len(content), what))
        return found, len(data)

    def _damage(self, start: int, num_bytes: int, what: str) -> Damage:
        tensors = _name_tensors(self._index, self._number, start, start + num_bytes)
        return Damage(self._path, what, start // BLOCK_BYTES, tensors)


def _path(manifest: Manifest, file: FileRecord) -> str:
    return f"{manifest.data}/{file.name}"


def _count_hashed_bytes(file: FileRecord) -> int:
    """Offset of the checksum table, computed from the file's size, so without the index."""
    return max(file.num_bytes - 8 * math.ceil(file.num_bytes / (BLOCK_BYTES + 8)), 0)


def _name_tensors(index: Index | None, number: int, start: int, stop: int) -> tuple[str, ...]:
    if index is None:
        return ()
    hit = (index.file == number) & (index.start < stop) & (index.start + index.num_bytes > start)
    return tuple(index.names[t] for t in np.unique(index.chunks.tensor[hit]).tolist())
