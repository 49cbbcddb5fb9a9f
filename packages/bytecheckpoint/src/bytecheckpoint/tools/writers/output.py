"""What the writers of other formats share: files that appear whole, and tensors in slabs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.topology.boxes import Box, decompose

__all__ = ["SLAB_BYTES", "appearing", "data_of", "slabs"]

# Tensors are read and written in pieces of this size; more would not be faster.
SLAB_BYTES = 32 * 1024 * 1024


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A file or folder made under another name, which appears when the block is left.

    Args:
        path: where it is to be; must not exist, or be an empty folder.

    Yields:
        The path to make it under. After an error nothing is left of it.

    Raises:
        ConfigError: there is something already.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists; write somewhere else, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield making
        inside = [*making.rglob("*"), making] if making.is_dir() else [making]
        for one in inside:
            _sync(one)
        if path.is_dir():
            path.rmdir()
        making.rename(path)
        _sync(path.parent)
    except BaseException:
        if making.is_dir():
            shutil.rmtree(making, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                making.unlink()
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def slabs(box: Box, itemsize: int, max_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Cuts a box into smaller ones, in the order of its elements.

    Args:
        box: of a tensor's global index space.
        itemsize: bytes of an element.
        max_bytes: none is larger, but for single elements.
    """
    limit = max(max_bytes // itemsize, 1)
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    # Whole rows of the outermost dimension of which one fits make one box a slab.
    row = 1
    for size in reversed(box.sizes):
        if row * size > limit:
            break
        row *= size
    step = limit // row * row
    for start in range(0, box.numel, step):
        for part in decompose(box.sizes, start, min(start + step, box.numel)):
            offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
            yield Box(offsets, part.sizes)


def data_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
