"""The file format of logged messages: a header, records one after another, and a footer.

A record is a fixed header, with a checksum of its own, and the message's bytes, whose 64-bit digest
the header holds. A receipt has a digest and no bytes. A file grows at its end only, so that a crash
leaves at most one torn record there, which readers ignore. The footer counts the records: a file
without one was not closed.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from io import BufferedReader
from typing import NamedTuple

import torch
from torch import Tensor

from shared.errors import DataError
from shared.kernels.digest import digest

__all__ = [
    "CHUNK_BYTES",
    "FOOTER_BYTES",
    "RECORD_BYTES",
    "ChunkHeader",
    "Key",
    "Kind",
    "MessageRecord",
    "count_bytes",
    "decode",
    "decode_footer",
    "encode",
    "encode_footer",
]


class Kind(IntEnum):
    """What a record is about: a message that this stage sent, or the receipt of one."""

    ACTIVATION = 0
    GRADIENT = 1
    ACTIVATION_RECEIPT = 2
    GRADIENT_RECEIPT = 3

    @property
    def receipt(self) -> Kind:
        """The receipt of a message of this kind."""
        return Kind(self + 2)

    @property
    def has_bytes(self) -> bool:
        """Whether a record of this kind holds the message, and not its digest alone."""
        return self < Kind.ACTIVATION_RECEIPT

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Key(NamedTuple):
    """Which message: its kind, iteration and micro-batch."""

    kind: Kind
    iteration: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of iteration {self.iteration}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """The start of a file.

    Attributes:
        run: the run's id, at most 64 bytes as UTF-8.
        stage: that sent the messages.
        sequence: the file's number in its folder; older ones are removed first, so none is missing
            between two.
        iteration: the first whose messages may be in the file.
    """

    run: str
    stage: int
    sequence: int
    iteration: int

    def encode(self) -> bytes:
        """As the first bytes of a file."""
        words = (_START, self.run.encode(), self.stage, self.sequence, self.iteration)
        return _with_checksum(_CHUNK.pack(*words))

    @staticmethod
    def decode(data: bytes) -> ChunkHeader | None:
        """From a file's first bytes; None if they are no header."""
        words = _unpack(_CHUNK, data)
        if words is None or words[0] != _START:
            return None
        run = words[1].rstrip(b"\0").decode(errors="replace")
        return ChunkHeader(run=run, stage=words[2], sequence=words[3], iteration=words[4])


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """Where a message lies in a file, and what it looks like.

    Attributes:
        key: of the message.
        dtype: of the message.
        shape: of the message.
        digest: of the message.
        offset: of its bytes in the file.
        num_bytes: of the message in the file; none of a receipt.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: int
    offset: int
    num_bytes: int

    def read(self, file: BufferedReader) -> Tensor:
        """The message.

        Raises:
            DataError: its bytes are not those that were logged.
        """
        data = bytearray(self.num_bytes)
        file.seek(self.offset)
        count = file.readinto(data)
        whole = (
            torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        )
        tensor = whole.reshape(self.shape)
        if count != self.num_bytes or digest(tensor) != self.digest:
            raise DataError(
                f"{self.key}: expected the {self.num_bytes} bytes of digest {self.digest:016x} that "
                f"were logged, got others in {file.name}; the disk or memory changed them"
            )
        return tensor


def count_bytes(key: Key, tensor: Tensor) -> int:
    """Bytes of the record of a message, or of its receipt."""
    return RECORD_BYTES + (tensor.numel() * tensor.element_size() if key.kind.has_bytes else 0)


def encode(key: Key, tensor: Tensor, offset: int) -> tuple[MessageRecord, bytes, memoryview]:
    """A record, its header, and its bytes, to be written at `offset` of a file.

    Args:
        key: of the message.
        tensor: the message, contiguous, on the CPU; of a receipt the one received.
        offset: of the record in its file.

    Raises:
        DataError: the tensor has a type or a number of dimensions that no record has.
    """
    if tensor.dtype not in _DTYPES or tensor.dim() > _NUM_DIMS:
        raise DataError(
            f"{key}: expected at most {_NUM_DIMS} dimensions and a type among "
            f"{', '.join(map(str, _DTYPES))}, got {list(tensor.shape)} of {tensor.dtype}; send others"
        )
    data = memoryview(b"")
    if key.kind.has_bytes and tensor.numel():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
    record = MessageRecord(
        key=key, dtype=tensor.dtype, shape=tuple(tensor.shape), digest=digest(tensor),
        offset=offset + RECORD_BYTES, num_bytes=len(data),
    )  # fmt: skip
    dims = [*tensor.shape, *[0] * (_NUM_DIMS - tensor.dim())]
    words = (_RECORD_START, key.kind, _DTYPES.index(tensor.dtype), tensor.dim(), key.iteration)
    header = _RECORD.pack(*words, key.micro_batch, len(data), record.digest, *dims)
    return record, _with_checksum(header), data


def decode(header: bytes, offset: int) -> MessageRecord | None:
    """The record whose header lies at `offset`; None if that is damaged, short or no header."""
    words = _unpack(_RECORD, header)
    if words is None or words[0] != _RECORD_START:
        return None
    _, kind, dtype, num_dims, iteration, micro_batch, num_bytes, told, *dims = words
    return MessageRecord(
        key=Key(Kind(kind), iteration, micro_batch), dtype=_DTYPES[dtype],
        shape=tuple(dims[:num_dims]), digest=told, offset=offset + RECORD_BYTES, num_bytes=num_bytes,
    )  # fmt: skip


def encode_footer(num_records: int) -> bytes:
    """What ends a file of so many records."""
    return _with_checksum(_FOOTER.pack(_END, num_records))


def decode_footer(footer: bytes) -> int | None:
    """The number of records that a footer counts; None if it is none."""
    words = _unpack(_FOOTER, footer)
    return words[1] if words is not None and words[0] == _END else None


def _with_checksum(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


def _unpack(form: struct.Struct, data: bytes) -> tuple | None:
    """The words of a checked header; None if it is short or damaged."""
    if len(data) != form.size + 4 or _with_checksum(data[:-4]) != data:
        return None
    return form.unpack(data[:-4])


_NUM_DIMS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_START, _RECORD_START, _END = b"MYSWIFT1", b"MSG1", b"MYSWEND1"
_CHUNK = struct.Struct("<8s64sIIq")
_RECORD = struct.Struct("<4sBBBxqiQQ8q")
_FOOTER = struct.Struct("<8sQ")
CHUNK_BYTES, RECORD_BYTES, FOOTER_BYTES = (form.size + 4 for form in (_CHUNK, _RECORD, _FOOTER))
