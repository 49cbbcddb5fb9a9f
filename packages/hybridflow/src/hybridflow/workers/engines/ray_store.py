"""Values in Ray's object store: what is large is put there where it was made, and only its
reference travels.

A reference that passes through the controller is counted by Ray like any other, so that a value
lives as long as somebody holds its handle. Ray maps values read-only; what is taken out of the
store is copied once, and only as far as it is wanted.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from hybridflow.workers.engines.packing import SMALL_BYTES, decode, encode
from shared.errors import CommError

__all__ = ["RayStore", "Stored", "read", "written"]


class Stored(NamedTuple):
    """A value: itself where it is small, else where Ray keeps it.

    Attributes:
        data: the stream, empty when it is kept by Ray.
        ref: of the stream and the buffers beside it.
    """

    data: bytes
    ref: ray.ObjectRef | None = None


class RayStore:
    """Writes and reads values from any process of the cluster."""

    def pack(self, value: Any) -> Stored:
        """Writes a value, which lives until its last handle is gone, or the process that wrote."""
        data, buffers = encode(value)
        if not buffers and len(data) < SMALL_BYTES:
            return Stored(data)
        return Stored(b"", ray.put([pickle.PickleBuffer(data), *buffers]))

    def load(self, handle: Stored, wanted: Callable[[Any], Any] | None = None) -> Any:
        """Reads a value, of which what is wanted becomes the reader's own.

        Raises:
            CommError: if the process that wrote it has ended.
        """
        if handle.ref is None:
            value = decode(handle.data, ())
            return value if wanted is None else wanted(value)
        try:
            data, *shared = map(memoryview, ray.get(handle.ref))
        except RayError as error:
            raise CommError(
                f"a value can no longer be read, as the rank that made it has ended "
                f"({type(error).__name__}); start again from the last checkpoint"
            ) from error
        if wanted is not None:
            with warnings.catch_warnings():
                # Nothing writes to these tensors: they are only narrowed and copied.
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                data, buffers = encode(wanted(decode(data, shared)))
            shared = [buffer.raw() for buffer in buffers]
        return decode(data, [bytearray(buffer) for buffer in shared])


def written(value: Any) -> tuple[bytes, list[ray.ObjectRef]]:
    """A message as bytes, which Ray sends fastest, and the references in it, which it counts."""
    stream, refs = io.BytesIO(), []
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.refs = refs
    pickler.dump(value)
    return stream.getvalue(), refs


def read(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """The message that `written` wrote."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.refs = refs
    return unpickler.load()


class _Pickler(pickle.Pickler):
    refs: list[ray.ObjectRef]

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, ray.ObjectRef):
            return None
        self.refs.append(obj)
        return len(self.refs) - 1


class _Unpickler(pickle.Unpickler):
    refs: Sequence[ray.ObjectRef]

    def persistent_load(self, index: int) -> ray.ObjectRef:
        return self.refs[index]
