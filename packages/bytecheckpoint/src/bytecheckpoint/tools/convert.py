"""Conversion of a checkpoint of any format into another program's format."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from inspect import signature

from bytecheckpoint.loading.checkpoint import open_any
from bytecheckpoint.tools.writers.registry import WRITERS
from shared.errors import ConfigError

__all__ = ["convert"]

_log = logging.getLogger(__name__)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str,
    *,
    prefix: str | None = None,
    config: str | os.PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint in another format, in about 200 MiB of memory at most.

    Args:
        src: path or URL of a checkpoint of any format, or path of a file of torch.save.
        dst: local path to write: a folder, or for some formats a file. It must not exist, or be an
            empty folder. It appears when it is complete and synced.
        to: a name in `bytecheckpoint.tools.writers.registry.WRITERS`.
        prefix: for "safetensors", prefix of the names of the tensors to write, which is stripped;
            None: "model.", unless the source has no such names or is a safetensors folder.
        config: for "safetensors", folder of the model's config.json, which is copied with the files
            of a tokenizer beside it; None: the source, where it is a safetensors folder.
        progress: called with the number of bytes written since its last call.

    Raises:
        ConfigError: there is no such format, no config.json in the folder that was named, or `dst` exists or is no local path.
        DataError: the source is damaged, or holds values that the format cannot store.
    """
    if "://" in os.fspath(dst):
        raise ConfigError(
            f"expected a local path to write to, got {os.fspath(dst)}; write to a local folder and "
            f"copy it"
        )
    write = WRITERS.get(to)
    options = {}
    for name, value in (("prefix", prefix), ("config", config)):
        if name in signature(write).parameters:
            options[name] = value
        elif value is not None:
            _log.warning(
                "the %s %r is ignored: a checkpoint in %s has none", name, os.fspath(value), to
            )
    with open_any(src) as checkpoint:
        write(checkpoint, dst, progress=progress, **options)
