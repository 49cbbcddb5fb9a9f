"""The manifest: the one file whose appearance makes a checkpoint exist.

It lists every other file with its size and hash, and ends with a hash of its own preceding bytes,
so that no flipped bit in it goes unseen. Data files are hashed by blocks (see `index`); the manifest
holds the hash of each table of block hashes, which completes the chain.
"""

from __future__ import annotations

import msgspec
import xxhash

from bytecheckpoint.storage.files.index import FORMAT_VERSION
from shared.errors import DataError

__all__ = ["MANIFEST_NAME", "FileRecord", "Manifest"]

MANIFEST_NAME = "manifest.json"
_FORMAT = "bytecheckpoint"
_SEAL = b'\n,"xxh3_128":"'
_END = b'"}\n'


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the checkpoint.

    Attributes:
        name: path under the folder of the manifest.
        num_bytes: its size.
        xxh3_128: hash in hex, of a data file's table of block hashes or another file's content.
    """

    name: str
    num_bytes: int
    xxh3_128: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The list of a checkpoint's files.

    Attributes:
        format: "bytecheckpoint".
        version: version of the format.
        step: the training step, None if none was given.
        world_size: ranks that wrote it.
        data: folder of the other files, beside the manifest.
        index: the index file.
        extra: the file of non-tensor values.
        files: the data files, in the order of the index.
        metric: how good the state is, by which the best checkpoints are kept; unset if nobody said.
    """

    format: str = _FORMAT
    version: int = FORMAT_VERSION
    step: int | None = None
    world_size: int
    data: str
    index: FileRecord
    extra: FileRecord
    files: list[FileRecord]
    metric: float | msgspec.UnsetType = msgspec.UNSET

    def encode(self) -> bytes:
        """JSON with one line per member, ending with a hash of the preceding bytes."""
        body = msgspec.json.format(msgspec.json.encode(self), indent=1).removesuffix(b"\n}")
        return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + _END

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Reads what `encode` wrote.

        Args:
            data: the bytes.
            where: the file's path, for errors.

        Raises:
            DataError: if a single bit differs, or another version wrote it.
        """
        body, seal, rest = data.rpartition(_SEAL)
        if not seal or rest != xxhash.xxh3_128_hexdigest(body).encode() + _END:
            raise DataError(
                f"{where}: the manifest does not have the hash it ends with; it is damaged or no "
                f"checkpoint of ours; load an older step (`bytecheckpoint ls` lists them)"
            )
        try:
            found = msgspec.json.decode(body + b"}", type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: expected a manifest, {error}") from error
        if found.format != _FORMAT or found.version != FORMAT_VERSION:
            raise DataError(
                f"{where}: expected {_FORMAT} version {FORMAT_VERSION}, got {found.format} version "
                f"{found.version}; read it with a newer bytecheckpoint"
            )
        return found
