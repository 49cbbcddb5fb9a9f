"""Single files of torch.save, written tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bytecheckpoint.formats.pickles import StoredTensor, compute_strides
from bytecheckpoint.formats.tree import expand
from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.state.values import decode_tree
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.tools.writers.archive import ArchiveWriter
from bytecheckpoint.tools.writers.new_path import make_new
from bytecheckpoint.tools.writers.pickles import dump_tree
from bytecheckpoint.tools.writers.slabs import cut_slabs, view_bytes
from shared.topology.boxes import Box

__all__ = ["write_torch"]


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
        progress: called with the number of bytes written since its last call.

    Raises:
        ConfigError: the file exists.
        DataError: the checkpoint is damaged.
    """
    index = checkpoint.index
    stored = []
    for at, (dtype, shape) in enumerate(zip(index.dtypes, index.shapes, strict=True)):
        whole = Box((0,) * len(shape), shape)
        num_bytes = whole.numel * int(index.itemsizes[at])
        strides = compute_strides(shape)
        stored.append(StoredTensor(parse_dtype(dtype), str(at), num_bytes, 0, shape, strides))
    tree = expand(checkpoint.source.extra, checkpoint.names)
    state = decode_tree(tree, lambda name: stored[index.position[name]])
    with make_new(Path(file)) as making, making.open("wb") as out:
        archive = ArchiveWriter(out)
        archive.write("data.pkl", dump_tree(state))
        archive.write("byteorder", b"little")
        for name, tensor in zip(index.names, stored, strict=True):
            archive.stream(
                f"data/{tensor.key}",
                tensor.storage_bytes,
                _read_blocks(checkpoint, name, tensor, progress),
            )
        archive.write("version", b"3\n")
        archive.finish()


def _read_blocks(
    checkpoint: Checkpoint, name: str, tensor: StoredTensor, progress: Callable[[int], None] | None
) -> Iterator[memoryview]:
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    for box in cut_slabs(whole, tensor.dtype.itemsize):
        block = view_bytes(checkpoint.read(name, box))
        yield block
        if progress is not None:
            progress(len(block))
