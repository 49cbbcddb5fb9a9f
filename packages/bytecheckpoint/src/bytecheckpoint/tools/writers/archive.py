"""Zip archives as torch.save makes them, written record by record without torch.save.

They are valid to any zip tool: sizes beyond 4 GiB use zip64, and every record has its CRC.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from io import BufferedIOBase

from bytecheckpoint.formats.zip_layout import (
    CENTRAL,
    CENTRAL_SIGN,
    COUNT_LIMIT,
    END,
    END64,
    END64_LOCATOR,
    END64_SIGN,
    END_SIGN,
    LIMIT,
    LOCAL,
    LOCAL_SIGN,
    LOCATOR_SIGN,
    ZIP64,
)
from bytecheckpoint.storage import Buffer
from shared.errors import DataError

__all__ = ["ArchiveWriter"]

_PADDING = 0x4246
# torch maps records into memory, and vector loads want them so.
_ALIGNMENT = 64
_TIME, _DATE = 0, 0x21  # 1 January 1980, as torch writes it: equal content gives equal bytes


class ArchiveWriter:
    """Writes one archive at the present position of a file, record by record."""

    def __init__(
        self, file: BufferedIOBase, folder: str = "archive", *, limit: int = LIMIT
    ) -> None:
        """Begins an archive.

        Args:
            file: open for writing in binary mode.
            folder: in which the records lie.
            limit: values from this one on are written in extra fields.
        """
        self._file = file
        self._folder = folder
        self._limit = limit
        self._start = file.tell()
        self._central: list[bytes] = []

    def write(self, name: str, data: Buffer) -> None:
        """Writes a record."""
        self._write_header(name, len(data), zlib.crc32(data))
        self._file.write(data)

    def stream(self, name: str, num_bytes: int, blocks: Iterable[Buffer]) -> None:
        """Writes a record whose content comes in blocks; the file must be seekable.

        Raises:
            DataError: the blocks have more or fewer bytes than announced.
        """
        header = self._file.tell()
        self._write_header(name, num_bytes, 0)
        begin, checksum = self._file.tell(), 0
        for block in blocks:
            self._file.write(block)
            checksum = zlib.crc32(block, checksum)
        end = self._file.tell()
        if end - begin != num_bytes:
            raise DataError(
                f"record {name!r}: expected {num_bytes} bytes, got {end - begin}; the source "
                f"changed"
            )
        # The checksum is known last and stands in both headers.
        self._file.seek(header)
        del self._central[-1]
        self._write_header(name, num_bytes, checksum)
        self._file.seek(end)

    def finish(self) -> int:
        """Writes the directory; returns the archive's length in bytes."""
        offset = self._file.tell() - self._start
        directory = b"".join(self._central)
        self._file.write(directory)
        count, size = len(self._central), len(directory)
        if count >= COUNT_LIMIT or size >= self._limit or offset >= self._limit:
            at = offset + size
            self._file.write(
                END64.pack(END64_SIGN, END64.size - 12, 45, 45, 0, 0, count, count, size, offset)
            )
            self._file.write(END64_LOCATOR.pack(LOCATOR_SIGN, 0, at, 1))
        small = min(count, COUNT_LIMIT)
        self._file.write(
            END.pack(
                END_SIGN, 0, 0, small, small, min(size, self._limit), min(offset, self._limit), 0
            )
        )
        return self._file.tell() - self._start

    def _write_header(self, name: str, num_bytes: int, checksum: int) -> None:
        path = f"{self._folder}/{name}".encode()
        at = self._file.tell()
        offset = at - self._start
        wide = num_bytes >= self._limit
        small = min(num_bytes, self._limit)
        extra = struct.pack("<2H2Q", ZIP64, 16, num_bytes, num_bytes) if wide else b""
        begin = at + LOCAL.size + len(path) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
        version = 45 if wide or offset >= self._limit else 10
        common = (0, 0, _TIME, _DATE, checksum, small, small, len(path))
        self._file.write(LOCAL.pack(LOCAL_SIGN, version, *common, len(extra)) + path + extra)
        wides = [num_bytes] * 2 * wide + [offset] * (offset >= self._limit)
        extra = struct.pack(f"<2H{len(wides)}Q", ZIP64, 8 * len(wides), *wides) if wides else b""
        start = min(offset, self._limit)
        self._central.append(
            CENTRAL.pack(CENTRAL_SIGN, version, version, *common, len(extra), *(0, 0, 0, 0), start)
            + path
            + extra
        )
