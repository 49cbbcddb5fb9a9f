"""The folder in which checkpoints lie, each in one of its own: a path, or a URL that fsspec knows."""

from __future__ import annotations

import posixpath
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.files import write_atomically

__all__ = ["CheckpointFolder", "open_folder"]


def open_folder(folder: str | Path) -> CheckpointFolder:
    """The folder at a path or a URL; nothing is read yet.

    Raises:
        ConfigError: fsspec cannot open the URL, or it is each process's own.
    """
    return _UrlFolder(str(folder)) if "://" in str(folder) else CheckpointFolder(str(folder))


class CheckpointFolder:
    """A folder in a file system."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def locate(self, name: str) -> str:
        """The path, or URL, of a checkpoint."""
        return posixpath.join(self._folder, name)

    def names(self, mark: str | None = None) -> list[str]:
        """What is in the folder; with `mark`, what has a file of that name in it."""
        found = Path(self._folder).glob(f"*/{mark}" if mark else "*")
        return [path.parent.name if mark else path.name for path in found]

    def write(self, name: str, text: str) -> None:
        """Writes a small file into a checkpoint that is there."""
        write_atomically(self.locate(name), text)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, as far as that is possible."""
        shutil.rmtree(self.locate(name), ignore_errors=True)

    def reader(self, name: str) -> Any:
        """DCP's StorageReader of a checkpoint."""
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(self.locate(name))


class _UrlFolder(CheckpointFolder):
    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        super().__init__(url)
        try:
            # What other ranks have written must be seen.
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"folder: expected a URL that fsspec opens, got {url}: {error}"
            ) from error
        if self._files.protocol == "memory":
            raise ConfigError(
                f"folder: expected one that all ranks see, got {url}, which is each process's own; give "
                f"a path or a store's URL"
            )

    def names(self, mark: str | None = None) -> list[str]:
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [
            posixpath.basename(path.rstrip("/"))
            for path in found
            if mark is None or self._files.exists(posixpath.join(path, mark))
        ]

    def write(self, name: str, text: str) -> None:
        self._files.pipe_file(posixpath.join(self._root, name), text.encode())

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._files.rm(posixpath.join(self._root, name), recursive=True)

    def reader(self, name: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(self.locate(name))
