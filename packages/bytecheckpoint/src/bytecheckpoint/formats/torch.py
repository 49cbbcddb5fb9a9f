"""Single files of torch.save: read in place by byte ranges, and written tensor by tensor.

The pickle in such a file describes the nested state, and says of each tensor in which record of the
archive its elements lie. That is all an index needs; `torch.load` of a whole file needs its size in
memory, or a memory map, which object stores do not have.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytecheckpoint.formats.archive import Archive, ArchiveWriter
from bytecheckpoint.formats.dcp import elements_start
from bytecheckpoint.formats.pickles import StoredTensor, contiguous_strides, dump_tree, load_tree
from bytecheckpoint.formats.ranges import Chunk, Window, build_index
from bytecheckpoint.formats.tree import encode, expand
from bytecheckpoint.state.values import decode_tree, encode_leaf
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.dtypes import dtype_named
from bytecheckpoint.storage.files.index import File, Index, plain_name
from bytecheckpoint.tools.writers.output import appearing, data_of, slabs
from shared.errors import DataError
from shared.topology.boxes import Box

if TYPE_CHECKING:
    from bytecheckpoint.loading.checkpoint import Checkpoint

__all__ = ["read_index", "write_torch"]

_log = logging.getLogger(__name__)


def read_index(storage: Storage, path: str) -> tuple[Index, dict[str, Any]]:
    """Reads the directory and the pickle of a file; no code that the pickle names is run.

    Args:
        storage: where it lies.
        path: of the file. The index names it without its folder.

    Returns:
        The index, and the tree of everything else (see `bytecheckpoint.state.values`). Tensors are named
        by their keys joined with dots.

    Raises:
        DataError: it is no such file, is damaged, holds other objects than tensors, containers and
            plain values, or tensors that are no row-major arrays of their own.
    """
    window = Window(storage, path)
    file = plain_name(posixpath.basename(path), path)
    archive = Archive(window.read, 0, window.num_bytes, path)
    found = load_tree(archive.read("data.pkl"), path)
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: expected a dictionary, got a {type(found).__name__}")
    stored: list[tuple[str, StoredTensor]] = []

    def leaf(value: Any, name: str) -> Any:
        if isinstance(value, StoredTensor):
            stored.append((name, value))
            return {"$tensor": name}
        try:
            return encode_leaf(value, name)
        except DataError as error:
            _log.warning("read as None: %s", error)
            return None

    tree = encode(found, "", leaf)
    if len({name for name, _ in stored}) != len(stored):
        raise DataError(f"{path}: two tensors have one name, keys joined by dots; rename a key")
    first: dict[StoredTensor, str] = {}
    aliases = {}
    for name, tensor in stored:
        known = first.setdefault(tensor, name)
        if known != name:
            aliases[name] = known
    chunks = [
        Chunk(
            name,
            Box((0,) * len(tensor.shape), tensor.shape),
            file,
            elements_start(archive, tensor, f"{path}, tensor {name!r}"),
        )
        for tensor, name in first.items()
    ]
    tensors = {name: (tensor.dtype, tensor.shape) for tensor, name in first.items()}
    index = build_index(tensors, chunks, [File(file, window.num_bytes)], path, aliases)
    return index, tree


def write_torch(
    checkpoint: Checkpoint,
    file: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes one file that torch.load(weights_only=True) reads, with mmap=True as well.

    Args:
        checkpoint: the source.
        file: made here; appears when it is whole and on disk.
        progress: told the bytes written since it was last told.

    Raises:
        ConfigError: the file exists.
        DataError: the checkpoint is damaged.
    """
    index = checkpoint.index
    stored = []
    for at, (dtype, shape) in enumerate(zip(index.dtypes, index.shapes, strict=True)):
        whole = Box((0,) * len(shape), shape)
        num_bytes = whole.numel * int(index.itemsizes[at])
        strides = contiguous_strides(shape)
        stored.append(StoredTensor(dtype_named(dtype), str(at), num_bytes, 0, shape, strides))
    tree = expand(checkpoint.source.extra, checkpoint.names)
    state = decode_tree(tree, lambda name: stored[index.position[name]])
    with appearing(Path(file)) as making, making.open("wb") as out:
        archive = ArchiveWriter(out)
        archive.write("data.pkl", dump_tree(state))
        archive.write("byteorder", b"little")
        for name, tensor in zip(index.names, stored, strict=True):
            archive.stream(
                f"data/{tensor.key}",
                tensor.storage_bytes,
                _blocks(checkpoint, name, tensor, progress),
            )
        archive.write("version", b"3\n")
        archive.finish()


def _blocks(
    checkpoint: Checkpoint, name: str, tensor: StoredTensor, progress: Callable[[int], None] | None
) -> Iterator[memoryview]:
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    for box in slabs(whole, tensor.dtype.itemsize):
        block = data_of(checkpoint.read(name, box))
        yield block
        if progress is not None:
            progress(len(block))
