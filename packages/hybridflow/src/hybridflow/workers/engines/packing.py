"""Serialisation of values as a short stream of bytes and separate large buffers.

Pickle's protocol 5 passes large buffers out of band, so that an engine can put them where another
process reads them without a copy; tensors become such buffers here. Functions and classes that the
other side could not import are sent with their file (see `shared.comms.launch.shipping`).
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shared.comms.launch.shipping import found, shipped
from shared.errors import ConfigError

__all__ = ["SMALL_BYTES", "decode", "encode"]

SMALL_BYTES = 16 * 1024
"""Buffers below this stay in the stream."""


def encode(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Serialises a value.

    Args:
        value: tensors on any device, and anything pickle can write; views are written without the
            rest of their storage, and tensors are detached from autograd's graph.

    Returns:
        The stream, and the out-of-band buffers, which share memory with the value.

    Raises:
        ConfigError: if a part of it cannot be pickled.
    """
    stream, buffers = io.BytesIO(), []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < SMALL_BYTES:
            return True
        buffers.append(buffer)
        return False

    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
    try:
        pickler.dump(value)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"a {type(value).__name__} cannot be sent to another process ({error}); pass tensors, "
            f"plain data, and functions defined at the top level of a file"
        ) from error
    return stream.getvalue(), buffers


def decode(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Reads what `encode` wrote; tensors are views of the buffers, which must be writable."""
    return pickle.loads(data, buffers=buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (Tensor, torch.nn.Parameter) and obj.layout is torch.strided:
            return _tensor, _parts(obj)
        if isinstance(obj, FunctionType | type) and not _is_importable(obj.__module__):
            return found, shipped(obj)
        return NotImplemented


def _parts(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().cpu().contiguous()
    if not plain.numel():
        return None, plain.dtype, plain.shape
    # As bytes, because numpy, which supplies the buffer, has no bfloat16.
    flat: Any = plain.view(-1).view(torch.uint8).numpy()
    return pickle.PickleBuffer(flat), plain.dtype, plain.shape


def _tensor(buffer: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if buffer is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


@lru_cache(maxsize=1024)
def _is_importable(name: str | None) -> bool:
    """Whether another process finds a module of that name, and the same one."""
    if name is None or name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return True  # built in, or unpicklable in its own way
    # Not importlib.util.find_spec, which returns the spec of a module that is loaded already.
    path, spec = None, None
    parts = name.split(".")
    for k in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == file
