"""Files of logged messages: one is written, and whole folders are checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from shared.errors import DataError
from swift.pipeline.records import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    RECORD_BYTES,
    ChunkHeader,
    Key,
    MessageRecord,
    decode,
    decode_footer,
    encode,
    encode_footer,
)

__all__ = ["ChunkFile", "LogChunk", "read_header", "scan_chunk", "verify_logs"]


class ChunkFile:
    """A file that grows record by record.

    Attributes:
        path: of the file.
        header: its first bytes' meaning.
        records: by message; of one that was logged twice, the later.
        num_bytes: written so far.

    Raises:
        OSError: the file cannot be made; it must not exist.
    """

    def __init__(self, path: Path, header: ChunkHeader) -> None:
        self.path, self.header = path, header
        self.records: dict[Key, MessageRecord] = {}
        self.num_bytes, self._num_records = 0, 0
        self._file = path.open("xb", buffering=0)
        try:
            self._write(header.encode())
        except OSError:
            self.remove()
            raise

    def append(self, messages: Sequence[tuple[Key, Tensor]]) -> list[MessageRecord]:
        """Writes records together; after an error the file ends as before.

        Args:
            messages: at most 512, as the system takes 1,024 parts in a call.

        Raises:
            OSError: the disk is full or gone.
            DataError: as `encode` raises it.
        """
        records, parts, offset = [], [], self.num_bytes
        for key, tensor in messages:
            record, header, data = encode(key, tensor, offset)
            records.append(record)
            parts += [header, data]
            offset += len(header) + len(data)
        self._write(*parts)
        self._num_records += len(records)
        return records

    def end(self) -> None:
        """Writes the footer and closes the file; one that cannot be written is left out."""
        if self._file.closed:
            return
        try:
            self._write(encode_footer(self._num_records))
        except OSError:
            pass
        finally:
            self._file.close()

    def remove(self) -> None:
        """Closes and removes the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, *parts: bytes | memoryview) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        try:
            while left:
                count = os.writev(self._file.fileno(), left)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except BaseException:
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)
            raise
        self.num_bytes += sum(len(part) for part in parts)


@dataclass(slots=True, kw_only=True)
class LogChunk:
    """What a file holds, and what is wrong with it.

    Attributes:
        path: of the file.
        header: the file's.
        records: by message; of one that was logged twice, the later.
        num_records: all, also those that later ones replaced.
        end: offset after the last whole record.
        is_closed: a footer that counts the records follows them.
        torn_bytes: at the end, of a record that was being written.
        damage: what is wrong beside a torn end.
    """

    path: Path
    header: ChunkHeader
    records: dict[Key, MessageRecord] = field(default_factory=dict)
    num_records: int = 0
    end: int = CHUNK_BYTES
    is_closed: bool = False
    torn_bytes: int = 0
    damage: list[str] = field(default_factory=list)


def read_header(path: Path) -> ChunkHeader:
    """The header of a file.

    Raises:
        DataError: it does not start as a log does.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = ChunkHeader.decode(file.read(CHUNK_BYTES))
    if header is None:
        raise DataError(f"{path}: expected a log of boundary messages, got another or damaged file")
    return header


def scan_chunk(path: Path) -> LogChunk:
    """Reads a file's headers, not its messages' bytes.

    Raises:
        DataError: it does not start as a log does.
        OSError: it cannot be read.
    """
    chunk = LogChunk(path=path, header=read_header(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        while chunk.end < size and not chunk.is_closed and not chunk.damage:
            if not _scan_record(file, chunk, size):
                break
    if not chunk.is_closed and not chunk.damage:
        chunk.torn_bytes = size - chunk.end
    return chunk


def verify_logs(folder: Path, run: str | None = None) -> list[LogChunk]:
    """Reads all logs below a folder, every message's bytes included.

    Args:
        folder: of a `BoundaryLog`, or of one stage.
        run: whose messages are expected; None: of each stage those of its newest file's run.

    Returns:
        The files by stage and number. `damage` also names messages whose bytes changed, files
        missing between two, and files of another run.

    Raises:
        DataError: there is no log, or a file is none.
        OSError: a file cannot be read.
    """
    chunks = [scan_chunk(path) for path in sorted(folder.rglob("*.log"))]
    if not chunks:
        raise DataError(
            f"expected logs (*.log) below {folder}, got none; name a BoundaryLog's folder"
        )
    chunks.sort(key=lambda chunk: (chunk.header.stage, chunk.header.sequence))
    newest = {chunk.header.stage: chunk.header.run for chunk in chunks}
    before: LogChunk | None = None
    for chunk in chunks:
        header = chunk.header
        if header.run != (expected := run or newest[header.stage]):
            chunk.damage.append(f"expected messages of run {expected!r}, got run {header.run!r}")
        if before is not None and before.header.stage == header.stage:
            missing = range(before.header.sequence + 1, header.sequence)
            chunk.damage += [f"file {number:06d} before this one is missing" for number in missing]
        with chunk.path.open("rb") as file:
            for record in chunk.records.values():
                if not record.key.kind.has_bytes:
                    continue
                try:
                    record.read(file)
                except DataError as error:
                    chunk.damage.append(str(error))
        before = chunk
    return chunks


def _scan_record(file: BinaryIO, chunk: LogChunk, size: int) -> bool:
    """Reads what lies at the chunk's end; whether it was a whole record."""
    file.seek(chunk.end)
    data = file.read(RECORD_BYTES)
    if len(data) == FOOTER_BYTES and (count := decode_footer(data)) is not None:
        chunk.is_closed = True
        if count != chunk.num_records:
            chunk.damage.append(f"the footer counts {count} records, got {chunk.num_records}")
        return False
    record = decode(data, chunk.end)
    if record is None:
        if len(data) == RECORD_BYTES:
            chunk.damage.append(f"the record at byte {chunk.end} has a damaged header")
        return False
    if record.offset + record.num_bytes > size:
        return False
    chunk.records[record.key] = record
    chunk.num_records += 1
    chunk.end = record.offset + record.num_bytes
    return True
