"""The zip archives of torch.save: where their records lie, and archives written without torch.save.

torch stores its records uncompressed, so that a tensor's elements are plain bytes of the file,
which may be read by range. A `.distcp` file is such archives one after another. What is written here
is valid to any zip tool: sizes beyond 4 GiB use zip64, and every record has its CRC.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from io import BufferedIOBase
from typing import NamedTuple

from bytecheckpoint.storage import Buffer
from shared.errors import DataError

__all__ = ["Archive", "ArchiveWriter", "Record"]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCAL_SIGN, _CENTRAL_SIGN, _END_SIGN = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_LOCATOR_SIGN, _END64_SIGN = b"PK\6\7", b"PK\6\6"
_ZIP64, _PADDING = 0x0001, 0x4246
_LIMIT, _COUNT_LIMIT = 0xFFFFFFFF, 0xFFFF
_MAX_DIRECTORY_BYTES = 1 << 30

# torch maps records into memory, and vector loads want them so.
_ALIGNMENT = 64
_TIME, _DATE = 0, 0x21  # 1 January 1980, as torch writes it: equal content gives equal bytes


class Record(NamedTuple):
    """Where a record's bytes lie.

    Attributes:
        start: offset in the file that holds the archive.
        num_bytes: its length.
    """

    start: int
    num_bytes: int


class Archive:
    """The records of an archive inside a file, by name without the leading folder."""

    def __init__(
        self, read: Callable[[int, int], bytes], start: int, num_bytes: int, where: str
    ) -> None:
        """Reads the archive's directory.

        Args:
            read: gives the bytes at an offset of the file, of a length.
            start: where the archive begins in the file.
            num_bytes: its length.
            where: the file's name and whose archive it is, for errors.

        Raises:
            DataError: it is no archive, cut off, or not of stored records.
        """
        self._read, self._start, self._where = read, start, where
        self._end = start + num_bytes
        count, size, offset = self._directory(num_bytes)
        self._limit = start + offset
        self._entries = self._listed(self._bytes(start + offset, size), count)

    @property
    def names(self) -> list[str]:
        """Names of the records."""
        return list(self._entries)

    def locate(self, name: str) -> Record:
        """Where a record lies.

        Raises:
            DataError: there is none of that name.
        """
        if name not in self._entries:
            raise self._damaged(f"it has no record {name!r}")
        header, num_bytes = self._entries[name]
        fields = _LOCAL.unpack(self._bytes(self._start + header, _LOCAL.size))
        start = self._start + header + _LOCAL.size + fields[9] + fields[10]
        if fields[0] != _LOCAL_SIGN or start + num_bytes > self._limit:
            raise self._damaged(f"its record {name!r} is not where the directory says")
        return Record(start, num_bytes)

    def read(self, name: str, max_bytes: int = 1 << 28) -> bytes:
        """The content of a small record.

        Raises:
            DataError: there is none of that name, or it is larger than `max_bytes`.
        """
        record = self.locate(name)
        if record.num_bytes > max_bytes:
            raise self._damaged(f"its record {name!r} has {record.num_bytes} bytes")
        return self._bytes(record.start, record.num_bytes)

    def _directory(self, num_bytes: int) -> tuple[int, int, int]:
        """Number of records, and length and offset of the directory."""
        if num_bytes < _END.size:
            raise self._damaged(f"{num_bytes} bytes are none")
        sign, *_, count, size, offset, comment = _END.unpack(
            self._bytes(self._end - _END.size, _END.size)
        )
        if sign != _END_SIGN or comment:
            raise self._damaged("its end is missing")
        end = num_bytes - _END.size
        if count == _COUNT_LIMIT or _LIMIT in (size, offset):
            end -= _END64_LOCATOR.size
            sign, _, at, _ = self._unpacked(_END64_LOCATOR, end)
            if sign != _LOCATOR_SIGN or at + _END64.size > end:
                raise self._damaged("its end is missing")
            sign, *_, count, size, offset = self._unpacked(_END64, at)
            if sign != _END64_SIGN:
                raise self._damaged("its end is missing")
            end = at
        if offset + size > end or size > _MAX_DIRECTORY_BYTES:
            raise self._damaged("its directory lies outside of it")
        return count, size, offset

    def _unpacked(self, form: struct.Struct, offset: int) -> tuple:
        if offset < 0:
            raise self._damaged("its end is missing")
        return form.unpack(self._bytes(self._start + offset, form.size))

    def _listed(self, directory: bytes, count: int) -> dict[str, tuple[int, int]]:
        entries: dict[str, tuple[int, int]] = {}
        at = 0
        try:
            for _ in range(count):
                fields = _CENTRAL.unpack_from(directory, at)
                sign, _, _, flags, method, _, _, _, stored, num_bytes, name_len, extra_len = fields[
                    :12
                ]
                header = fields[16]
                at += _CENTRAL.size
                name = directory[at : at + name_len].decode()
                extra = directory[at + name_len : at + name_len + extra_len]
                at += name_len + extra_len + fields[12]
                if sign != _CENTRAL_SIGN:
                    raise self._damaged("its directory is not one")
                num_bytes, stored, header = _zip64(extra, num_bytes, stored, header)
                if method or flags & 1 or stored != num_bytes:
                    raise self._damaged(
                        f"its record {name!r} is compressed or encrypted, which torch.save never does"
                    )
                entries[name.partition("/")[2]] = (header, num_bytes)
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"its directory is not one, {error}") from error
        return entries

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        if offset < self._start or offset + num_bytes > self._end:
            raise self._damaged("a part of it lies outside")
        return self._read(offset, num_bytes)

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self._where}: expected an archive of torch.save, but {what}; the file is cut off "
            f"or damaged, or another program wrote it"
        )


def _zip64(extra: bytes, *values: int) -> list[int]:
    """Values of which those at the 32-bit limit stand in the extra field, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            wide = iter(
                struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4)
            )
            return [next(wide, value) if value == _LIMIT else value for value in values]
        at += 4 + length
    return list(values)


class ArchiveWriter:
    """Writes one archive at the present position of a file, record by record."""

    def __init__(self, file: BufferedIOBase, folder: str = "archive") -> None:
        self._file = file
        self._folder = folder
        self._start = file.tell()
        self._central: list[bytes] = []

    def write(self, name: str, data: Buffer) -> None:
        """Writes a record."""
        self._header(name, len(data), zlib.crc32(data))
        self._file.write(data)

    def stream(self, name: str, num_bytes: int, blocks: Iterable[Buffer]) -> None:
        """Writes a record whose content comes in blocks; the file must be seekable.

        Raises:
            DataError: the blocks have more or fewer bytes than announced.
        """
        header = self._file.tell()
        self._header(name, num_bytes, 0)
        begin, checksum = self._file.tell(), 0
        for block in blocks:
            self._file.write(block)
            checksum = zlib.crc32(block, checksum)
        end = self._file.tell()
        if end - begin != num_bytes:
            raise DataError(
                f"record {name!r}: expected {num_bytes} bytes, got {end - begin}; the source changed"
            )
        # The checksum is known last and stands in both headers.
        self._file.seek(header)
        del self._central[-1]
        self._header(name, num_bytes, checksum)
        self._file.seek(end)

    def finish(self) -> int:
        """Writes the directory; returns the archive's length in bytes."""
        offset = self._file.tell() - self._start
        directory = b"".join(self._central)
        self._file.write(directory)
        count, size = len(self._central), len(directory)
        if count >= _COUNT_LIMIT or size >= _LIMIT or offset >= _LIMIT:
            at = offset + size
            self._file.write(
                _END64.pack(_END64_SIGN, _END64.size - 12, 45, 45, 0, 0, count, count, size, offset)
            )
            self._file.write(_END64_LOCATOR.pack(_LOCATOR_SIGN, 0, at, 1))
        small = min(count, _COUNT_LIMIT)
        self._file.write(
            _END.pack(_END_SIGN, 0, 0, small, small, min(size, _LIMIT), min(offset, _LIMIT), 0)
        )
        return self._file.tell() - self._start

    def _header(self, name: str, num_bytes: int, checksum: int) -> None:
        path = f"{self._folder}/{name}".encode()
        at = self._file.tell()
        offset = at - self._start
        wide = num_bytes >= _LIMIT
        small = min(num_bytes, _LIMIT)
        extra = struct.pack("<2H2Q", _ZIP64, 16, num_bytes, num_bytes) if wide else b""
        begin = at + _LOCAL.size + len(path) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
        version = 45 if wide or offset >= _LIMIT else 10
        common = (0, 0, _TIME, _DATE, checksum, small, small, len(path))
        self._file.write(_LOCAL.pack(_LOCAL_SIGN, version, *common, len(extra)) + path + extra)
        wides = [num_bytes] * 2 * wide + [offset] * (offset >= _LIMIT)
        extra = struct.pack(f"<2H{len(wides)}Q", _ZIP64, 8 * len(wides), *wides) if wides else b""
        self._central.append(
            _CENTRAL.pack(
                _CENTRAL_SIGN,
                version,
                version,
                *common,
                len(extra),
                0,
                0,
                0,
                0,
                min(offset, _LIMIT),
            )
            + path
            + extra
        )
