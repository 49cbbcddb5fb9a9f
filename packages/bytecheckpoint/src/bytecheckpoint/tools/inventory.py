"""Lists the checkpoints at a URL: those of a run, or a single one."""

from __future__ import annotations

import posixpath
from typing import NamedTuple

from bytecheckpoint.formats.registry import find_folder_format
from bytecheckpoint.loading.source import open_source
from bytecheckpoint.storage import Storage, open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.index import Index
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from shared.errors import DataError

__all__ = ["Entry", "find_newest", "list_checkpoints"]


class Entry(NamedTuple):
    """One checkpoint, as far as its small files can be read.

    Attributes:
        url: URL of its folder.
        path: path of the folder below the listed URL; "" for that URL itself.
        step: step of training, None if none was given.
        num_bytes: number of bytes of all its files.
        world_size: number of ranks that saved it.
        num_files: number of data files.
        num_tensors: number of tensors, tied names not counted.
        damage: why values above are missing.
        has_checksums: whether its format has checksums of the tensors' bytes.
    """

    url: str
    path: str
    step: int | None = None
    num_bytes: int | None = None
    world_size: int | None = None
    num_files: int | None = None
    num_tensors: int | None = None
    damage: str = ""
    has_checksums: bool = True


def list_checkpoints(url: str) -> list[Entry]:
    """Lists the checkpoints with a manifest at a URL by step, including damaged ones.

    A folder of another format is one entry, whose numbers are of its files of tensors.
    """
    storage = open_storage(url)
    names = storage.list("")
    if MANIFEST_NAME in names:
        return [_read_entry(storage, url, "")]
    steps = sorted((step, name) for name in names if (step := commit.parse_step(name)) is not None)
    if not steps and find_folder_format(names) is not None:
        return [_read_other(storage, url)]
    return [
        _read_entry(storage, posixpath.join(url, name), name)
        for _, name in steps
        if MANIFEST_NAME in storage.list(name)
    ]


def find_newest(url: str) -> str:
    """Returns the URL of a run's newest complete checkpoint; any other URL is returned as it is."""
    storage = open_storage(url)
    steps = commit.list_steps(storage)
    if MANIFEST_NAME in storage.list("") or not steps:
        return url
    return posixpath.join(url, commit.format_step(steps[-1]))


def _read_other(storage: Storage, url: str) -> Entry:
    entry = Entry(url, "", has_checksums=False)
    try:
        index = Index.decode(open_source(storage, "").index, url)
    except (DataError, OSError) as error:
        return entry._replace(damage=str(error))
    return entry._replace(
        num_bytes=sum(file.num_bytes for file in index.files),
        num_files=len(index.files),
        num_tensors=len(index.names),
    )


def _read_entry(storage: Storage, url: str, path: str) -> Entry:
    entry = Entry(url, path)
    try:
        manifest = commit.read_manifest(storage, path)
        files = [manifest.index, manifest.extra, *manifest.files]
        entry = entry._replace(
            step=manifest.step,
            num_bytes=sum(file.num_bytes for file in files),
            world_size=manifest.world_size,
            num_files=len(manifest.files),
        )
        commit.check_files(storage, path, manifest)
        index = commit.read_index(storage, path, manifest)
    except (DataError, OSError) as error:
        return entry._replace(damage=str(error))
    return entry._replace(num_tensors=len(index.names))
