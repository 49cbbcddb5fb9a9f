"""Reads the pickles in torch's files without running code that they name.

A pickle may call any function of any module. This reader replaces each class that torch's files
need by a record of plain values, and refuses any other name. A tensor becomes a record of its
storage, offset, size and strides; its elements stay in the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.storage import _dtype_to_storage_type_map

from shared.errors import DataError

__all__ = [
    "TYPED_STORAGES",
    "Metadata",
    "StorageRecord",
    "StoredTensor",
    "compute_strides",
    "load_metadata",
    "load_tree",
]

TYPED_STORAGES = {
    dtype: name for dtype, name in _dtype_to_storage_type_map().items() if hasattr(torch, name)
}
_DTYPES = {name: dtype for dtype, name in TYPED_STORAGES.items()}
_FAILURES = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


# Tuples, because a pickle may set the attributes of objects it makes.
class StorageRecord(NamedTuple):
    """A record of elements in an archive; its length is in elements, or without a type in bytes."""

    dtype: torch.dtype | None
    key: str
    num_elements: int


class StoredTensor(NamedTuple):
    """A tensor whose elements lie in a record of the archive.

    Attributes:
        dtype: type of its elements.
        key: the record is data/<key>.
        storage_bytes: length of the record.
        offset: offset of its first element in the record, in elements.
        shape: its sizes.
        strides: in elements.
        is_plain: False if it is a lazy conjugate or negative of the elements.
    """

    dtype: torch.dtype
    key: str
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_plain: bool = True


def compute_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Computes the strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Metadata:
    """A DCP folder's `.metadata`, and each object in it: whatever attributes it was pickled with."""


class _TensorProperties:
    def __setstate__(self, state: tuple) -> None:
        self.dtype = state[0]


def _name_member(enum: type, name: str) -> str:
    if enum is not int or type(name) is not str:
        raise TypeError("an attribute of something that is no enum")
    return name


def _allow_metadata_globals() -> dict[tuple[str, str], Any]:
    """What a `.metadata` may name; new at each call, because a pickle may write to classes."""
    dcp = "torch.distributed.checkpoint"
    records = [
        (f"{dcp}.metadata", "Metadata"),
        (f"{dcp}.metadata", "TensorStorageMetadata"),
        (f"{dcp}.metadata", "BytesStorageMetadata"),
        (f"{dcp}.metadata", "ChunkStorageMetadata"),
        (f"{dcp}.metadata", "MetadataIndex"),
        (f"{dcp}.metadata", "StorageMeta"),
        (f"{dcp}.filesystem", "_StorageInfo"),
    ]
    found: dict[tuple[str, str], Any] = {
        place: type(place[1], (Metadata,), {}) for place in records
    }
    for module, enum in (
        (f"{dcp}.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ):
        found[module, "TensorProperties"] = type("TensorProperties", (_TensorProperties,), {})
        found[module, enum] = int
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as an attribute of its class.
    found["builtins", "getattr"] = _name_member
    found["torch.serialization", "_get_layout"] = str
    found["torch", "Size"] = tuple
    found["collections", "OrderedDict"] = OrderedDict
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            found[module, name] = lambda *parts: "/".join(parts)
    return found


class _Rebuild:
    """Stands for the functions that rebuild tensors; bound methods, so that nothing can be set."""

    def v2(
        self,
        storage: StorageRecord,
        offset: int,
        shape: tuple,
        strides: tuple,
        requires_grad: bool,
        hooks: Any,
        metadata: dict | None = None,
    ) -> StoredTensor:
        if storage.dtype is None:
            raise TypeError("a tensor of version 2 needs a typed storage")
        return _make_stored(storage, storage.dtype, offset, shape, strides, not metadata)

    def v3(
        self,
        storage: StorageRecord,
        offset: int,
        shape: tuple,
        strides: tuple,
        requires_grad: bool,
        hooks: Any,
        dtype: torch.dtype,
        metadata: dict | None = None,
    ) -> StoredTensor:
        return _make_stored(storage, dtype, offset, shape, strides, not metadata)

    def parameter(self, tensor: StoredTensor, requires_grad: bool, hooks: Any) -> StoredTensor:
        if not isinstance(tensor, StoredTensor):
            raise TypeError("a parameter of something that is no tensor")
        return tensor

    def encode(self, text: str, encoding: str) -> bytes:
        # Protocol 2 encodes bytes as text.
        if encoding != "latin1":
            raise ValueError(f"bytes as {encoding!r}")
        return text.encode("latin1")


def _make_stored(
    storage: StorageRecord,
    dtype: torch.dtype,
    offset: int,
    shape: tuple,
    strides: tuple,
    is_plain: bool,
) -> StoredTensor:
    numbers = (offset, storage.num_elements, *shape, *strides)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("a tensor's sizes are no whole numbers")
    if len(shape) != len(strides) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor needs a type and as many strides as sizes")
    itemsize = 1 if storage.dtype is None else storage.dtype.itemsize
    num_bytes = storage.num_elements * itemsize
    return StoredTensor(
        dtype, storage.key, num_bytes, offset, tuple(shape), tuple(strides), is_plain
    )


_rebuild = _Rebuild()
_TREE_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild.v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild.v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild.parameter,
    ("_codecs", "encode"): _rebuild.encode,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: dict[tuple[str, str], Any], trusted: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._trusted = allowed, trusted

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if self._trusted:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> StorageRecord:
        kind, dtype, key, _, num_elements = pid
        is_typed = dtype is None or isinstance(dtype, torch.dtype)
        if kind != "storage" or not is_typed or not isinstance(key, str) or not key.isalnum():
            raise pickle.UnpicklingError("it refers to something that is no storage")
        return StorageRecord(dtype, key, num_elements)


def _check_memo(data: bytes) -> None:
    """Refuses entries that no writer makes: the table is as long as the largest entry's number."""
    for opcode, entry, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(entry or 0) > len(data):
            raise ValueError(f"it fills entry {entry} of a table, in a pickle of {len(data)} bytes")


def _load(
    data: bytes, allowed: dict[tuple[str, str], Any], where: str, *, trusted: bool = False
) -> Any:
    try:
        _check_memo(data)
        return _Reader(data, allowed, trusted).load()
    except _FAILURES as error:
        raise DataError(
            f"{where}: the pickle was refused: {error}. Nothing in it was run; if you trust its "
            f"source, load it with torch and save tensors and plain values"
        ) from error


def load_metadata(data: bytes, where: str, *, trust_pickle: bool = False) -> Metadata:
    """Reads the `.metadata` of a DCP folder.

    Args:
        data: its bytes.
        where: its path, for errors.
        trust_pickle: import and call any other function that it names.

    Raises:
        DataError: it names a function or class that is not allowed, or is no such pickle.
    """
    found = _load(data, _allow_metadata_globals(), where, trusted=trust_pickle)
    if not isinstance(found, Metadata):
        raise DataError(f"{where}: expected a pickle of Metadata, got a {type(found).__name__}")
    return found


def load_tree(data: bytes, where: str) -> Any:
    """Reads the `data.pkl` of an archive of torch.save, with `StoredTensor` for every tensor.

    Raises:
        DataError: it holds objects other than tensors, containers and plain values.
    """
    return _load(data, _TREE_GLOBALS, where)
