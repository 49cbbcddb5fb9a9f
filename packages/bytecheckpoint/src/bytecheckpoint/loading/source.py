"""A checkpoint to read from: the content of its small files, and verified bytes of its data files.

Our format, Hugging Face folders and DCP folders differ only in how the index is made. Files with
checksums are read in whole blocks, and each block is compared with its checksum before use.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from bytecheckpoint.formats.registry import FORMATS, Format, find_folder_format
from bytecheckpoint.state.values import dump, parse
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.index import BLOCK_BYTES, Index, count_blocks
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME, FileRecord
from shared.errors import DataError

__all__ = ["Source", "Summary", "open_source", "read_summary", "split_url"]

# A URL with one slash too few is refused when it is opened.
_PROTOCOL = re.compile(r"[^/]+:/+")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a checkpoint, in a form that is sent between ranks.

    Attributes:
        kind: "native", or the kind of a format in `bytecheckpoint.formats.registry`.
        folder: folder of the data files, from the storage's root.
        index: the encoded index.
        extra: non-tensor values, as JSON.
        files: the manifest's records of the data files; empty without a manifest.
        step, world_size: training step and number of ranks, from the manifest.
    """

    kind: str
    folder: str
    index: bytes
    extra: bytes
    files: list[FileRecord] = []
    step: int | None = None
    world_size: int = 1


@dataclass
class Source:
    """A checkpoint whose index was read and checked.

    Attributes:
        storage: storage that holds it.
        summary: content of its small files.
        index: the decoded index.
        verify: whether bytes are compared with their checksums.
        num_bytes_read: bytes that this process read from storage.
    """

    storage: Storage
    summary: Summary
    index: Index
    verify: bool = True
    num_bytes_read: int = 0
    _tables: dict[int, memoryview] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, storage: Storage, summary: Summary, *, verify: bool = True) -> Source:
        """Decodes a summary.

        Raises:
            DataError: the index does not describe whole tensors, or not these files.
        """
        index = Index.decode(summary.index, f"{summary.folder}/index")
        if summary.kind == "native":
            commit.check_listed(index, summary.files, f"{summary.folder}/index")
        return cls(storage, summary, index, verify)

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Non-tensor content: "tree", values that differ by rank, and the save's trace."""
        where = f"{self.summary.folder}/extra"
        found = parse(self.summary.extra, where)
        if not isinstance(found, dict):
            raise DataError(f"{where}: expected an object with a tree; the file is damaged")
        return found

    @property
    def has_values(self) -> bool:
        """Whether it holds non-tensor values; a folder of safetensors files does not."""
        return self.summary.kind == "native" or self.extra["tree"] is not None

    def has_checksums(self, file: int) -> bool:
        """Whether blocks of a file are verified."""
        return self.verify and self.index.files[file].hashed_bytes is not None

    def path(self, file: int) -> str:
        """Path of a data file, from the storage's root."""
        return posixpath.join(self.summary.folder, self.index.files[file].name)

    def read(self, file: int, start: int, buffer: memoryview) -> None:
        """Fills a buffer from a data file; any thread.

        Args:
            file: position of the file in the index.
            start: offset of the first byte; in files with checksums the start of a block.
            buffer: memory to fill; in files with checksums it must end with a block, or with the
                hashed bytes.

        Raises:
            DataError: a block does not match its checksum, or the file is missing or cut off; the
                message names the file, the block, and the tensors with elements in it.
        """
        self._fill(file, start, buffer)
        if not self.has_checksums(file):
            return
        table = self._get_table(file)
        for at in range(0, len(buffer), BLOCK_BYTES):
            block = (start + at) // BLOCK_BYTES
            digest = xxhash.xxh3_64_intdigest(buffer[at : at + BLOCK_BYTES])
            if digest.to_bytes(8, "little") != table[8 * block : 8 * block + 8]:
                raise DataError(
                    f"{self.path(file)}: block {block} (bytes {block * BLOCK_BYTES} to "
                    f"{block * BLOCK_BYTES + len(buffer[at : at + BLOCK_BYTES])}) does not have "
                    f"its checksum; it holds parts of {self._name_held(file, block)}. The file is "
                    f"damaged: load another step"
                )

    def check_fronts(self, first: int, step: int) -> None:
        """Verifies the header and checksum table of every step-th file, before tensors are read.

        Raises:
            DataError: a file is damaged, or was swapped for another.
        """
        for file in range(first, len(self.index.files), step):
            if not self.has_checksums(file):
                continue
            self._get_table(file)
            starts = self.index.start[self.index.file == file]
            hashed = self.index.files[file].hashed_bytes or 0
            end = -(-int(starts.min(initial=hashed)) // BLOCK_BYTES) * BLOCK_BYTES
            self.read(file, 0, memoryview(bytearray(min(end, hashed))))

    def _name_held(self, file: int, block: int) -> str:
        """The tensors with elements in a block, for errors."""
        index, first = self.index, block * BLOCK_BYTES
        rows = (index.file == file) & (index.start < first + BLOCK_BYTES)
        rows &= index.start + index.num_bytes > first
        names = [index.names[t] for t in index.chunks.tensor[rows].tolist()]
        if not names:
            return "the file's header"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(map(repr, names[:3])) + more

    def _get_table(self, file: int) -> memoryview:
        with self._lock:
            if file not in self._tables:
                entry = self.index.files[file]
                hashed = entry.hashed_bytes or 0
                table = memoryview(bytearray(8 * count_blocks(hashed)))
                self._fill(file, hashed, table)
                if xxhash.xxh3_128_hexdigest(table) != self.summary.files[file].xxh3_128:
                    raise DataError(
                        f"{self.path(file)}: its table of checksums does not have the hash in the "
                        f"manifest; the file is damaged or was swapped: load another step"
                    )
                self._tables[file] = table
            return self._tables[file]

    def _fill(self, file: int, start: int, buffer: memoryview) -> None:
        try:
            self.storage.read_into(self.path(file), start, buffer)
        except FileNotFoundError as error:
            raise DataError(f"{self.path(file)}: expected a data file, found none") from error
        self.num_bytes_read += len(buffer)


def split_url(url: str) -> tuple[str, str]:
    """The URL of the folder that holds a checkpoint, and the checkpoint's name in it.

    The name is "" for a bucket, or another root without a folder above it.
    """
    text = str(url).removeprefix("hf://").removeprefix("file://")
    protocol = _PROTOCOL.match(text)
    start = protocol.end() if protocol else 0
    head, slash, name = text[start:].rstrip("/").rpartition("/")
    if name in ("", ".", "..", "~") or (protocol and not head):
        return (text, "")
    return (text[:start] + (head or slash or "."), name)


def open_source(storage: Storage, path: str) -> Summary:
    """Reads and verifies the small files of a checkpoint, and the sizes of the large ones.

    Args:
        storage: storage that holds it.
        path: path of its folder, "" for the root itself.

    Raises:
        FileNotFoundError: there is no checkpoint; the message lists what the folder holds.
        DataError: it is damaged, its files contradict each other, or it is a file.
    """
    names = storage.list(path)
    folder, name = posixpath.split(path)
    if not names and name in storage.sizes(folder):
        raise DataError(
            f"{posixpath.join(storage.url, path)}: expected the folder of a checkpoint, got a file; "
            f"make a folder of it: bytecheckpoint convert {name} FOLDER --to dcp"
        )
    if MANIFEST_NAME in names:
        manifest = commit.read_manifest(storage, path)
        index, extra = commit.read_contents(storage, path, manifest)
        commit.check_files(storage, path, manifest)
        return Summary(
            kind="native",
            folder=posixpath.join(path, manifest.data),
            index=index,
            extra=extra,
            files=manifest.files,
            step=manifest.step,
            world_size=manifest.world_size,
        )
    other = find_folder_format(names)
    if other is not None:
        return read_summary(other, storage, path, folder=path)
    patterns = [one.pattern for one in map(FORMATS.get, FORMATS) if not one.is_file]
    is_run = any(name.startswith("step_") for name in names)
    told = "got a folder of steps; open one of them, or use Checkpointer.load_latest"
    raise FileNotFoundError(
        f"{posixpath.join(storage.url, path)}: expected a checkpoint ({MANIFEST_NAME}), or a folder with "
        f"{' or '.join(patterns)}, {told if is_run else describe_folder(names)}"
    )


def describe_folder(names: Sequence[str]) -> str:
    """What a folder without a checkpoint holds, and what to do: the end of an error's sentence."""
    if not names:
        return "there is nothing; check the path"
    return f"got a folder with {', '.join(names[:5])}; name another"


def read_summary(other: Format, storage: Storage, path: str, *, folder: str) -> Summary:
    """Reads the `Summary` of a checkpoint of another format.

    Args:
        other: its format.
        storage: storage that holds it.
        path: path of its folder, or of its file.
        folder: folder of its data files.

    Raises:
        DataError: it is damaged, or cannot be read by ranges.
    """
    index, tree = other.read(storage, path)
    extra = dump({"tree": tree, "ranks": {}, "trace": []})
    return Summary(kind=other.kind, folder=folder, index=index.encode(), extra=extra)
