"""Locates the records in the zip archives of torch.save.

torch stores records uncompressed, so that a tensor's elements are plain bytes of the file and can
be read by range. A `.distcp` file is a concatenation of such archives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

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
from shared.errors import DataError

__all__ = ["Archive", "Record"]

_MAX_DIRECTORY_BYTES = 1 << 30


class Record(NamedTuple):
    """The byte range of a record.

    Attributes:
        start: offset in the file that holds the archive.
        num_bytes: its length.
    """

    start: int
    num_bytes: int


class Archive:
    """The records of an archive inside a file, by name without the leading folder."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        start: int,
        num_bytes: int,
        where: str,
        *,
        limit: int = LIMIT,
    ) -> None:
        """Reads the archive's directory.

        Args:
            read: function of an offset in the file and a length that returns the bytes.
            start: offset of the archive in the file.
            num_bytes: length of the archive.
            where: name of the file and of the archive's tensor, shown in errors.
            limit: value of a 32-bit field that means that the true value is in the extra field.

        Raises:
            DataError: it is not an archive, is cut off, or has compressed records.
        """
        self._read, self._start, self._where = read, start, where
        self._field_limit = limit
        self._end = start + num_bytes
        count, size, offset = self._find_directory(num_bytes)
        self._limit = start + offset
        self._entries = self._list_records(self._read_bytes(start + offset, size), count)

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
            raise self._make_error(f"it has no record {name!r}")
        header, num_bytes = self._entries[name]
        fields = LOCAL.unpack(self._read_bytes(self._start + header, LOCAL.size))
        start = self._start + header + LOCAL.size + fields[9] + fields[10]
        if fields[0] != LOCAL_SIGN or start + num_bytes > self._limit:
            raise self._make_error(f"its record {name!r} is not where the directory says")
        return Record(start, num_bytes)

    def read(self, name: str, max_bytes: int = 1 << 28) -> bytes:
        """The content of a small record.

        Raises:
            DataError: there is none of that name, or it is larger than `max_bytes`.
        """
        record = self.locate(name)
        if record.num_bytes > max_bytes:
            raise self._make_error(f"its record {name!r} has {record.num_bytes} bytes")
        return self._read_bytes(record.start, record.num_bytes)

    def _find_directory(self, num_bytes: int) -> tuple[int, int, int]:
        """Number of records, and length and offset of the directory."""
        if num_bytes < END.size:
            raise self._make_error(f"{num_bytes} bytes are none")
        sign, *_, count, size, offset, comment = END.unpack(
            self._read_bytes(self._end - END.size, END.size)
        )
        if sign != END_SIGN or comment:
            raise self._make_error("its end is missing")
        end = num_bytes - END.size
        if count == COUNT_LIMIT or self._field_limit in (size, offset):
            end -= END64_LOCATOR.size
            sign, _, at, _ = self._unpack(END64_LOCATOR, end)
            if sign != LOCATOR_SIGN or at + END64.size > end:
                raise self._make_error("its end is missing")
            sign, *_, count, size, offset = self._unpack(END64, at)
            if sign != END64_SIGN:
                raise self._make_error("its end is missing")
            end = at
        if offset + size > end or size > _MAX_DIRECTORY_BYTES:
            raise self._make_error("its directory lies outside of it")
        return count, size, offset

    def _unpack(self, form: struct.Struct, offset: int) -> tuple:
        if offset < 0:
            raise self._make_error("its end is missing")
        return form.unpack(self._read_bytes(self._start + offset, form.size))

    def _list_records(self, directory: bytes, count: int) -> dict[str, tuple[int, int]]:
        entries: dict[str, tuple[int, int]] = {}
        at = 0
        try:
            for _ in range(count):
                fields = CENTRAL.unpack_from(directory, at)
                sign, _, _, flags, method, _, _, _, stored, num_bytes, name_len, extra_len = fields[
                    :12
                ]
                header = fields[16]
                at += CENTRAL.size
                name = directory[at : at + name_len].decode()
                extra = directory[at + name_len : at + name_len + extra_len]
                at += name_len + extra_len + fields[12]
                if sign != CENTRAL_SIGN:
                    raise self._make_error("its directory is not one")
                num_bytes, stored, header = _widen(
                    extra, self._field_limit, num_bytes, stored, header
                )
                if method or flags & 1 or stored != num_bytes:
                    raise self._make_error(
                        f"its record {name!r} is compressed or encrypted, which torch.save "
                        f"never does"
                    )
                entries[name.partition("/")[2]] = (header, num_bytes)
        except (struct.error, UnicodeDecodeError) as error:
            raise self._make_error(f"its directory is not one, {error}") from error
        return entries

    def _read_bytes(self, offset: int, num_bytes: int) -> bytes:
        if offset < self._start or offset + num_bytes > self._end:
            raise self._make_error("a part of it lies outside")
        return self._read(offset, num_bytes)

    def _make_error(self, what: str) -> DataError:
        return DataError(
            f"{self._where}: expected an archive of torch.save, but {what}; the file is cut off "
            f"or damaged, or another program wrote it"
        )


def _widen(extra: bytes, limit: int, *values: int) -> list[int]:
    """The values, of which those at the limit are read from the extra field, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64:
            wide = iter(
                struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4)
            )
            return [next(wide, value) if value == limit else value for value in values]
        at += 4 + length
    return list(values)
