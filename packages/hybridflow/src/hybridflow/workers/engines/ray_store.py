"""Values in Ray's object store: large values stay on the machine that made them, and only
references are sent.

Ray counts a reference that passes through the controller like any other, so that a value lives as
long as any process holds its handle. Ray maps values read-only; the reader copies once, and only
the part it needs.
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
    """A value's handle: the value itself if small, else a reference to Ray's object.

    Attributes:
        data: the stream; empty if Ray stores it.
        ref: Ray's reference to the stream and its buffers; None if the value is small.
    """

    data: bytes
    ref: ray.ObjectRef | None = None


class RayStore:
    """Writes and reads values from any process of the cluster."""

    def pack(self, value: Any) -> Stored:
        """Writes a value, which lives until its last handle is released or its writer ends."""
        data, buffers = encode(value)
        if not buffers and len(data) < SMALL_BYTES:
            return Stored(data)
        return Stored(b"", ray.put([pickle.PickleBuffer(data), *buffers]))

    def load(self, handle: Stored, wanted: Callable[[Any], Any] | None = None) -> Any:
        """Reads a value, or `wanted(value)`, as a copy that the reader may write to.

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
    """Encodes a message as bytes, which Ray sends fastest, and its references, which Ray counts."""
    stream, refs = io.BytesIO(), []
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.refs = refs
    pickler.dump(value)
    return stream.getvalue(), refs


def read(data: bytes, refs: Sequence[ray.ObjectRef]) -> Any:
    """Decodes a message encoded by `written`."""
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
