"""Storage of checkpoints: a local or mounted folder, or any file system of fsspec.

`open_storage` chooses by the URL; `Storage` is the interface that the rest of the package uses.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from bytecheckpoint.storage.base import WRITE_BYTES, Buffer, Sink, Storage
from shared.errors import ConfigError

__all__ = ["WRITE_BYTES", "Buffer", "Sink", "Storage", "open_storage"]

_CUT_URL = re.compile(r"[a-z0-9]+:/(?!/)")


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Opens the storage of a URL: a path or file:// is local, fsspec finds others (s3://, memory://).

    Raises:
        ConfigError: no such protocol; its library is not installed (the message has the pip
            command); or a URL with one slash, as pathlib makes, which would be a folder "s3:".
    """
    text = os.fspath(url)
    if found := _CUT_URL.match(text):
        raise ConfigError(
            f"expected a path or a URL like {found[0]}/..., got {text!r}; pathlib drops a slash of "
            f"URLs, so give it as text"
        )
    # Imported here because fsspec takes longer than a local save of a small state.
    if "://" not in text or text.startswith("file://"):
        from bytecheckpoint.storage.local import LocalStorage

        return LocalStorage(text.removeprefix("file://"))
    if text.startswith(("s3://", "s3a://")) and find_spec("s3fs"):
        from bytecheckpoint.storage.s3 import S3Storage

        return S3Storage(text)
    from bytecheckpoint.storage.fsspec import FsspecStorage

    return FsspecStorage(text)
