"""Small checkpoints of known content, saved by nothing but sinks and `commit`."""

import json
import mmap
import posixpath
import random

import numpy as np

from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.index import ChunkTable, File, Index
from bytecheckpoint.storage.files.manifest import Manifest
from shared.errors import DataError

NUM_FILES = 2
FILE_BYTES = 5000  # a page written directly, the rest not


def content(step, version, rank):
    return random.Random(f"{step} {version} {rank}").randbytes(FILE_BYTES)


def save(storage, step, version, *, overwrite=False, path=None):
    """A checkpoint of `NUM_FILES` tensors, each the whole of a file; its manifest."""
    path = commit.format_step(step) if path is None else path
    data = commit.draw_folder_name()
    ranks = range(NUM_FILES)
    parts = [content(step, version, rank) for rank in ranks]
    names = [f"rank-{rank:05d}.safetensors" for rank in ranks]
    for name, part in zip(names, parts, strict=True):
        sink = storage.create(posixpath.join(path, data, name), FILE_BYTES)
        with mmap.mmap(-1, FILE_BYTES) as aligned, memoryview(aligned) as view:
            view[:] = part
            sink.write_at(0, view)
        sink.finish()
    index = Index(
        names=[f"tensor{rank}" for rank in ranks],
        dtypes=["uint8"] * NUM_FILES,
        shapes=[(FILE_BYTES,)] * NUM_FILES,
        chunks=ChunkTable(
            np.arange(NUM_FILES, dtype=np.int32),
            np.zeros((NUM_FILES, 1), np.int64),
            np.full((NUM_FILES, 1), FILE_BYTES),
        ),
        file=np.arange(NUM_FILES, dtype=np.int32),
        start=np.zeros(NUM_FILES, np.int64),
        files=[File(name, FILE_BYTES) for name in names],
    ).encode()
    extra = json.dumps([step, version]).encode()
    manifest = Manifest(
        step=step,
        world_size=NUM_FILES,
        data=data,
        index=commit.describe_file("index.msgpack", index),
        extra=commit.describe_file("extra.json", extra),
        files=[commit.describe_file(name, part) for name, part in zip(names, parts, strict=True)],
    )
    commit.commit(storage, path, manifest, index, extra, overwrite=overwrite)
    return manifest


def version_of(storage, step, path=None):
    """Loads a checkpoint whole; which version of the step it is."""
    path = commit.format_step(step) if path is None else path
    manifest = commit.read_manifest(storage, path)
    index = commit.read_index(storage, path, manifest)
    found_step, version = json.loads(commit.read_extra(storage, path, manifest))
    if found_step != step:
        raise DataError(f"step {found_step} lies in the place of {step}")
    for rank, file in enumerate(index.files):
        part = bytearray(file.num_bytes)
        storage.read_into(posixpath.join(path, manifest.data, file.name), 0, memoryview(part))
        if part != content(step, version, rank):
            raise DataError(f"{file.name} has lost bytes")
    return version
