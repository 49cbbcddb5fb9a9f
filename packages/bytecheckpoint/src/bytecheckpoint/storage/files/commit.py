"""Commits, finds and removes checkpoints atomically.

A save writes into a new data folder, which no reader opens yet. When all of it would survive a
power loss, the manifest appears in one atomic operation, a rename (file system) or a put (object
store): that is the commit. Removal deletes the manifest first. So at any time, also after a crash,
a visible manifest names a complete checkpoint. No file points at the newest checkpoint: it is found
by listing.
"""

from __future__ import annotations

import logging
import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import xxhash

from bytecheckpoint.storage import WRITE_BYTES, Storage
from bytecheckpoint.storage.files.index import Index
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME, FileRecord, Manifest
from shared.errors import DataError

__all__ = [
    "check_files",
    "check_listed",
    "commit",
    "describe_file",
    "discard",
    "discard_on_error",
    "draw_folder_name",
    "find_garbage",
    "find_steps",
    "format_step",
    "list_steps",
    "parse_step",
    "read_contents",
    "read_extra",
    "read_index",
    "read_manifest",
    "remove_checkpoint",
    "remove_garbage",
    "set_aside",
]

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{8,})")
_DATA = re.compile(r"data-[0-9a-f]{12}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_HASH = re.compile(r"[0-9a-f]{32}")
# Left by a killed publish; see LocalStorage.
_UNPUBLISHED = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]{{12}}")


def format_step(step: int) -> str:
    """Name of the folder below the root with the checkpoint of a training step."""
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """The step whose folder has this name; None if it is not a step's folder."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def draw_folder_name() -> str:
    """A new name for the folder of a save's files, beside its manifest."""
    return f"data-{secrets.token_hex(6)}"


def describe_file(name: str, content: bytes) -> FileRecord:
    """The manifest's record of an index or extra file with this content."""
    digest = xxhash.xxh3_128_hexdigest(content)
    return FileRecord(name=name, num_bytes=len(content), xxh3_128=digest)


def read_manifest(storage: Storage, path: str) -> Manifest:
    """Reads and verifies the manifest of a checkpoint, without looking at other files.

    Args:
        storage: storage that holds it.
        path: path of the checkpoint's folder, "" for the root itself.

    Raises:
        FileNotFoundError: there is no checkpoint, or not yet.
        DataError: the manifest is damaged, or names files that cannot be a checkpoint's.
    """
    where = _join(path, MANIFEST_NAME)
    manifest = Manifest.decode(storage.read(where), where)
    if not _DATA.fullmatch(manifest.data):
        raise DataError(
            f"{where}: expected a data folder like {draw_folder_name()}, got {manifest.data!r}; "
            f"do not load checkpoints from sources you do not trust"
        )
    records = [manifest.index, manifest.extra, *manifest.files]
    for file in records:
        if not _PLAIN_NAME.fullmatch(file.name):
            raise DataError(
                f"{where}: expected plain file names, got {file.name!r}; do not load checkpoints "
                f"from sources you do not trust"
            )
        if file.num_bytes < 0 or not _HASH.fullmatch(file.xxh3_128):
            raise DataError(f"{where}: {file.name} has an impossible size or hash")
    if len({file.name for file in records}) != len(records):
        raise DataError(f"{where}: a file stands there twice")
    return manifest


def read_index(storage: Storage, path: str, manifest: Manifest) -> Index:
    """The index a manifest names.

    Raises:
        DataError: it is missing, damaged, or lists other files than the manifest.
    """
    where = _join(path, manifest.data, manifest.index.name)
    index = Index.decode(_read_whole(storage, where, manifest.index), where)
    check_listed(index, manifest.files, where)
    return index


def check_listed(index: Index, files: list[FileRecord], where: str) -> None:
    """Checks that an index and its manifest list the same files.

    Raises:
        DataError: they list different files.
    """
    listed = [(file.name, file.num_bytes) for file in index.files]
    if listed != [(file.name, file.num_bytes) for file in files]:
        raise DataError(f"{where}: lists other files or sizes than its manifest; one was swapped")


def read_contents(storage: Storage, path: str, manifest: Manifest) -> tuple[bytes, bytes]:
    """The contents of the index file and of the file of non-tensor values.

    Raises:
        DataError: one is missing or damaged.
    """
    where = _join(path, manifest.data, manifest.index.name)
    return _read_whole(storage, where, manifest.index), read_extra(storage, path, manifest)


def read_extra(storage: Storage, path: str, manifest: Manifest) -> bytes:
    """The content of the file of non-tensor values.

    Raises:
        DataError: it is missing or damaged.
    """
    where = _join(path, manifest.data, manifest.extra.name)
    return _read_whole(storage, where, manifest.extra)


def check_files(storage: Storage, path: str, manifest: Manifest) -> None:
    """Checks that every file of a manifest exists with its size; needs one listing if all do.

    Raises:
        DataError: a file is missing or has another size; the message names the first one.
    """
    _check_sizes(storage, path, manifest, [manifest.index, manifest.extra, *manifest.files])


def commit(
    storage: Storage,
    path: str,
    manifest: Manifest,
    index: bytes,
    extra: bytes,
    *,
    overwrite: bool,
    before_publish: Callable[[], None] = lambda: None,
) -> None:
    """Commits a checkpoint durably; called by one rank when all sinks are finished.

    Args:
        storage: storage that holds the data files.
        path: path of the checkpoint's folder, "" for the root itself.
        manifest: names the data files, and the two files below with their sizes and hashes.
        index: content of the index file.
        extra: content of the file of non-tensor values.
        overwrite: whether to replace a checkpoint at the same path, whose data are then removed.
        before_publish: called when all but the manifest is durable; if it raises, nothing appears.

    Raises:
        DataError: a data file is missing or has another size than the manifest says.
        FileExistsError: there is a checkpoint and `overwrite` is False; it stays as it is.
        OSError: the storage failed. The manifest may exist nevertheless, if only the last sync or
            answer failed; so remove the data by `discard`, which checks for it.
    """
    _check_sizes(storage, path, manifest, manifest.files)
    data = _join(path, manifest.data)
    for file, content in ((manifest.index, index), (manifest.extra, extra)):
        assert file == describe_file(file.name, content), f"{file.name} is not as the manifest says"
        _write_whole(storage, _join(data, file.name), content)
    # Folders above the path may also be new, or left unsynced by a killed save.
    storage.sync_folders([data, *_list_upwards(path)])
    replaced = _find_data_folder(storage, path) if overwrite else None
    before_publish()
    storage.publish(_join(path, MANIFEST_NAME), manifest.encode(), overwrite=overwrite)
    if replaced is not None and replaced != manifest.data:
        try:
            storage.remove_tree(_join(path, replaced))
        except OSError as error:
            logger.warning("%s: %s; `bytecheckpoint gc` removes the rest", path, error)


def discard(storage: Storage, path: str, data: str) -> None:
    """Removes the files of a failed save, unless its manifest has appeared nevertheless.

    Args:
        storage: storage that holds it.
        path: path of the checkpoint's folder, "" for the root itself.
        data: name of the data folder of that save.
    """
    try:
        used = read_manifest(storage, path).data
    except FileNotFoundError:
        used = None
    except DataError:
        return  # which data folder is its own cannot be known
    if used != data:
        storage.remove_tree(_join(path, data))


@contextmanager
def discard_on_error(
    storage: Storage, path: str, data: str, *, may_appear: bool = False
) -> Iterator[None]:
    """Context manager around writing or committing: discards a save's files when it fails.

    Args:
        storage, path, data: see `discard`.
        may_appear: whether `commit` is called within. In an object store a manifest whose put
            seemed to fail may still appear, so its data stay, for `find_garbage` to find.
    """
    try:
        yield
    except BaseException as error:
        is_sure = not may_appear or isinstance(error, FileExistsError | DataError)
        if is_sure or storage.has_rename:
            try:
                discard(storage, path, data)
            except (OSError, DataError) as left:
                where = posixpath.join(storage.url, path, data)
                logger.warning("%s is left for `bytecheckpoint gc`: %s", where, left)
        raise


def list_steps(storage: Storage) -> list[int]:
    """Steps with a checkpoint, ascending: a whole manifest, and all its files with their sizes."""
    return find_steps(storage)[0]


def find_steps(storage: Storage) -> tuple[list[int], dict[int, str]]:
    """Finds the steps of a run.

    Returns:
        The steps with a checkpoint, as `list_steps`; and by step what is wrong with those that have
        a manifest, but are damaged.
    """
    names = [name for name in storage.list("") if parse_step(name) is not None]
    # Requests to an object store have a long latency: make many at once.
    with ThreadPoolExecutor(max_workers=8) as threads:
        damages = list(threads.map(lambda name: _find_damage(storage, name), names))
    whole, damaged = [], {}
    for name, damage in zip(names, damages, strict=True):
        step = parse_step(name)
        if step is None or damage is None:
            continue
        if damage:
            damaged[step] = damage
        else:
            whole.append(step)
    return sorted(whole), damaged


def set_aside(storage: Storage, path: str) -> str:
    """Gives a damaged checkpoint another name, under which nothing finds it; returns the name."""
    name = f"{path}.damaged-{secrets.token_hex(4)}"
    storage.move(path, name)
    return name


def remove_checkpoint(storage: Storage, path: str) -> None:
    """Removes a checkpoint: after a crash at any moment it is whole, or not a checkpoint."""
    storage.remove(_join(path, MANIFEST_NAME))
    storage.remove_tree(path)


def find_garbage(storage: Storage, path: str = "") -> list[str]:
    """Files left by saves that were not committed, and by removals that did not finish.

    A save in progress looks the same: call this only when there is none. A folder with a damaged
    manifest is not garbage, because its data may be wanted, nor are files that we do not write,
    such as a folder of another format with a name like ours.

    Args:
        storage: storage to search.
        path: a folder of steps, or of one checkpoint.

    Returns:
        Paths: folders of steps that hold nothing but garbage, data folders that no manifest names,
        and manifests that were never published.
    """
    names = storage.list(path)
    found = _list_leavings(storage, path, names)
    files = storage.sizes(path)
    for name in names:
        if parse_step(name) is not None and name not in files:
            step = _join(path, name)
            inside = storage.list(step)
            left = _list_leavings(storage, step, inside)
            found += left if len(left) < len(inside) else [step]
    return found


def remove_garbage(storage: Storage, paths: Iterable[str]) -> None:
    """Removes the paths that `find_garbage` returned."""
    for path in paths:
        folder, name = posixpath.split(path)
        if parse_step(name) is not None:
            remove_checkpoint(storage, path)
        else:
            # The manifest that replaced this folder's may be unsynced after a crash.
            storage.sync_folders([folder])
            storage.remove_tree(path)


def _list_leavings(storage: Storage, path: str, names: list[str]) -> list[str]:
    """Garbage directly in a checkpoint's folder."""
    found = [name for name in names if _UNPUBLISHED.fullmatch(name)]
    try:
        used = read_manifest(storage, path).data if MANIFEST_NAME in names else None
        found += [name for name in names if _DATA.fullmatch(name) and name != used]
    except DataError:
        pass  # which data folder is its own cannot be known
    return [_join(path, name) for name in found]


def _find_damage(storage: Storage, path: str) -> str | None:
    """What is wrong with a checkpoint, "" if it is whole; None if there is none."""
    try:
        check_files(storage, path, read_manifest(storage, path))
    except DataError as error:
        return str(error)
    except FileNotFoundError:
        return None
    return ""


def _find_data_folder(storage: Storage, path: str) -> str | None:
    """The data folder of the checkpoint that is there; of a damaged one it is not known."""
    try:
        return read_manifest(storage, path).data
    except (DataError, FileNotFoundError):
        return None


def _check_sizes(
    storage: Storage, path: str, manifest: Manifest, records: list[FileRecord]
) -> None:
    folder = _join(path, manifest.data)
    there = storage.sizes(folder)
    for file in records:
        size = there.get(file.name)
        if size != file.num_bytes:
            # NFS may list other hosts' files late, but finds a file when it is opened.
            with suppress(FileNotFoundError):
                size = storage.size(_join(folder, file.name))
        if size != file.num_bytes:
            came = "nothing" if size is None else f"{size} bytes"
            raise DataError(
                f"{_join(folder, file.name)}: expected a file of {file.num_bytes} bytes, got "
                f"{came}; the checkpoint is damaged, load another step"
            )


def _read_whole(storage: Storage, where: str, file: FileRecord) -> bytes:
    try:
        size = storage.size(where)
        content = storage.read(where) if size == file.num_bytes else None
    except FileNotFoundError as error:
        raise DataError(f"{where}: the manifest names it, but it is missing") from error
    if content is None:
        raise DataError(f"{where}: expected {file.num_bytes} bytes, got {size}; it was cut")
    if xxhash.xxh3_128_hexdigest(content) != file.xxh3_128:
        raise DataError(f"{where}: its content does not have the hash in the manifest; damaged")
    return content


def _write_whole(storage: Storage, where: str, content: bytes) -> None:
    sink = storage.create(where, len(content))
    try:
        for offset in range(0, len(content), WRITE_BYTES):
            sink.write_at(offset, memoryview(content)[offset : offset + WRITE_BYTES])
        sink.finish()
    except BaseException:
        sink.abort()
        raise


def _join(*parts: str) -> str:
    return posixpath.join(*(part for part in parts if part))


def _list_upwards(path: str) -> list[str]:
    """A folder and all above it up to the root."""
    folders = [path]
    while folders[-1]:
        folders.append(posixpath.dirname(folders[-1]))
    return folders
