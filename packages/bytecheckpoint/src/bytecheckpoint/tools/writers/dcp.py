"""Folders that torch.distributed.checkpoint loads, written by streaming.

Each chunk is an archive as torch.save makes it, but made here, so that no more than one chunk is
ever in memory and equal checkpoints give equal `.distcp` files.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bytecheckpoint.formats.dcp import METADATA_NAME
from bytecheckpoint.formats.pickles import StoredTensor, compute_strides
from bytecheckpoint.formats.tree import expand, flatten
from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import Index
from bytecheckpoint.tools.writers.archive import ArchiveWriter
from bytecheckpoint.tools.writers.new_path import make_new
from bytecheckpoint.tools.writers.pickles import dump_tree
from bytecheckpoint.tools.writers.slabs import SLAB_BYTES, cut_slabs, view_bytes
from shared.topology.boxes import Box

__all__ = ["write_dcp"]


def write_dcp(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    max_chunk_bytes: int = SLAB_BYTES,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint as a folder that torch.distributed.checkpoint.load reads.

    Names are as in the checkpoint, but for parameters in the state of an optimizer, which are named
    from their module on: `dcp.load({"model": get_model_state_dict(...), "optimizer":
    get_optimizer_state_dict(...)})` finds what was saved under the same keys. Memory stays at about
    one chunk.

    Args:
        checkpoint: the source.
        folder: made here; appears when it is whole and on disk.
        max_chunk_bytes: tensors are cut into chunks of at most this size, since torch reads whole
            chunks; rows that are larger are cut too.
        progress: called with the number of bytes written since its last call.

    Raises:
        ConfigError: the folder exists.
        DataError: the checkpoint is damaged.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    index = checkpoint.index
    flat = flatten(expand(checkpoint.source.extra, checkpoint.names))
    file_name = "__0_0.distcp"
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    with make_new(Path(folder)) as making:
        making.mkdir()
        with (making / file_name).open("wb") as file:
            for name, value in flat.values.items():
                start = file.tell()
                torch.save(value, file)
                described[name] = dcp.BytesStorageMetadata()
                places[dcp.MetadataIndex(name)] = _StorageInfo(
                    file_name, start, file.tell() - start
                )
            written: dict[int, str] = {}
            for name, stored_name in flat.tensors.items():
                at = index.position[stored_name]
                if at in written:
                    # Another name of the same bytes, which DCP itself never writes but reads.
                    described[name] = described[written[at]]
                    places |= {
                        dcp.MetadataIndex(name, item.offset, item.index): place
                        for item, place in places.items()
                        if item.fqn == written[at]
                    }
                    continue
                written[at] = name
                chunks = []
                for box in _cut_stored(index, at, max_chunk_bytes):
                    start = file.tell()
                    data = checkpoint.read(stored_name, box)
                    length = _write_tensor(ArchiveWriter(file), data)
                    item = dcp.MetadataIndex(name, box.offsets, len(chunks))
                    places[item] = _StorageInfo(file_name, start, length)
                    chunks.append(
                        dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    )
                    if progress is not None:
                        progress(data.nbytes)
                properties = dcp.TensorProperties(dtype=parse_dtype(index.dtypes[at]))
                described[name] = dcp.TensorStorageMetadata(
                    properties, torch.Size(index.shapes[at]), chunks
                )
        metadata = dcp.Metadata(
            state_dict_metadata=described,
            planner_data=flat.paths,
            storage_data=places,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        (making / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def _cut_stored(index: Index, tensor: int, max_bytes: int) -> Iterator[Box]:
    """The stored boxes of a tensor, none larger than asked."""
    shape, itemsize = index.shapes[tensor], int(index.itemsizes[tensor])
    for row in range(int(index.rows[tensor]), int(index.rows[tensor + 1])):
        yield from cut_slabs(index.chunks.box(row, len(shape)), itemsize, max_bytes)


def _write_tensor(archive: ArchiveWriter, data: torch.Tensor) -> int:
    shape = tuple(data.shape)
    stored = StoredTensor(data.dtype, "0", data.nbytes, 0, shape, compute_strides(shape))
    archive.write("data.pkl", dump_tree(stored))
    archive.write("byteorder", b"little")
    archive.write("data/0", view_bytes(data))
    archive.write("version", b"3\n")
    return archive.finish()
