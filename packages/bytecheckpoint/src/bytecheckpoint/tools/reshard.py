"""Rewrites a checkpoint as files of equal size for another number of ranks, without any rank.

Loading reshards by itself and does not need this. But a checkpoint of few large or many small files
is read faster after it is rewritten as about one file per rank, and one of another format gets
checksums. Data is streamed through about 64 MiB of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.loading.checkpoint import open as open_checkpoint
from bytecheckpoint.planner import planner
from bytecheckpoint.saving.file_stream import FileStream
from bytecheckpoint.state.values import dump
from bytecheckpoint.storage import Storage, open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import ChunkTable, Index
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME, FileRecord, Manifest
from bytecheckpoint.tools.writers.slabs import cut_slabs, view_bytes
from shared.errors import ConfigError

__all__ = ["reshard"]


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    world_size: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Rewrites a checkpoint in our format as `world_size` files.

    Names do not change, except those of a Hugging Face folder, which get the prefix "model.", so
    that `load(dst, {"model": model})` finds them.

    Args:
        src: path or URL of a checkpoint of any kind that can be opened.
        dst: path or URL of the new checkpoint's folder.
        world_size: number of files; fewer where tensors are too small to be cut.
        progress: called with the number of bytes of tensors written since its last call.

    Returns:
        Bytes of each file.

    Raises:
        ConfigError: `world_size` is below one.
        DataError: the source is damaged; nothing appears at the destination.
        FileExistsError: there is a checkpoint at the destination.
    """
    if world_size < 1:
        raise ConfigError(f"expected at least one file, got --world {world_size}")
    storage = open_storage(dst)
    if MANIFEST_NAME in storage.list(""):
        raise FileExistsError(f"{dst}: expected no checkpoint, but there is one; write elsewhere")
    with open_checkpoint(src) as checkpoint:
        is_model = not checkpoint.source.has_values
        prefix = "model." if is_model else ""
        plan = planner.plan(
            _give_to_all(checkpoint.index, prefix, world_size),
            world_size,
            aliases={prefix + a: prefix + b for a, b in checkpoint.index.aliases.items()},
        )
        index, extra = plan.index.encode(), checkpoint.source.extra
        if is_model:
            extra = extra | {"tree": {"model": {"$module": {}}}}
        values = dump(extra)
        folder = commit.draw_folder_name()
        with commit.discard_on_error(storage, "", folder):
            files = [
                _write(storage, folder, plan.part(rank), checkpoint, prefix, progress)
                for rank in plan.ranks.tolist()
            ]
        manifest = Manifest(
            step=checkpoint.source.summary.step,
            world_size=world_size,
            data=folder,
            index=commit.describe_file("index.msgpack", index),
            extra=commit.describe_file("extra.json", values),
            files=files,
        )
        with commit.discard_on_error(storage, "", folder, may_appear=True):
            commit.commit(storage, "", manifest, index, values, overwrite=False)
    return [file.num_bytes for file in files]


def _give_to_all(index: Index, prefix: str, world_size: int) -> planner.Pieces:
    """Whole tensors with all ranks as owners, so that planning can assign any part to any rank."""
    num_tensors = len(index.names)
    ndim = index.chunks.offsets.shape[1]
    sizes = np.ones((num_tensors, ndim), dtype=np.int64)
    for tensor, shape in enumerate(index.shapes):
        sizes[tensor, : len(shape)] = shape
    return planner.Pieces(
        names=[prefix + name for name in index.names],
        dtypes=index.dtypes,
        shapes=index.shapes,
        chunks=ChunkTable(
            np.tile(np.arange(num_tensors, dtype=np.int32), world_size),
            np.zeros((num_tensors * world_size, ndim), dtype=np.int64),
            np.tile(sizes, (world_size, 1)),
        ),
        owner=np.repeat(np.arange(world_size, dtype=np.int32), num_tensors),
    )


def _write(
    storage: Storage,
    folder: str,
    part: planner.RankPart,
    checkpoint: Checkpoint,
    prefix: str,
    progress: Callable[[int], None] | None,
) -> FileRecord:
    assert part.file is not None, "only ranks with a file are asked"
    dtypes = dict(zip(part.names, part.dtypes, strict=True))
    with FileStream(storage, folder, part.file) as stream:
        stream.write(part.header)
        for name, box, _ in part.rows:
            for slab in cut_slabs(box, parse_dtype(dtypes[name]).itemsize):
                data = view_bytes(checkpoint.read(name.removeprefix(prefix), slab))
                stream.write(data)
                if progress is not None:
                    progress(data.nbytes)
        return stream.finish()
