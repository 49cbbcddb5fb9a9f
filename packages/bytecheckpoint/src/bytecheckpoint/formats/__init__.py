"""Other formats of checkpoints, and conversion of any into any.

Readers make an index of the byte ranges of existing files, so that everything that reads our own
format by slices reads others by slices too. Writers stream, one piece of a tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from bytecheckpoint.loading.checkpoint import Checkpoint

__all__ = ["TARGETS", "convert", "open_any"]

TARGETS = ("dcp", "safetensors", "torch")


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str,
    *,
    prefix: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint in another format, in about 200 MiB of memory at most.

    Args:
        src: path or URL of any checkpoint that `open_any` takes.
        dst: a local folder, for "torch" a file; appears when it is whole and on disk.
        to: "dcp" (torch.distributed.checkpoint), "safetensors" (a Hugging Face folder of the
            model's weights alone) or "torch" (one file of torch.save).
        prefix: for "safetensors", which tensors are the model's, and what is cut from their names;
            by default "model." unless the source is such a folder itself or has no such names.
        progress: told the bytes written since it was last told.

    Raises:
        ConfigError: `to` or `dst` cannot be, or `dst` exists.
        DataError: the source is damaged, or holds what the format cannot.
    """
    if "://" in os.fspath(dst):
        raise ConfigError(f"expected a local path to write to, got {os.fspath(dst)}")
    with open_any(src) as checkpoint:
        match to:
            case "dcp":
                from bytecheckpoint.formats.dcp import write_dcp

                write_dcp(checkpoint, dst, progress=progress)
            case "safetensors":
                from bytecheckpoint.formats.hf import write_hf

                if prefix is None:
                    names = checkpoint.index.names
                    is_state = any(name.startswith("model.") for name in names)
                    prefix = "model." if is_state and checkpoint.kind != "hf" else ""
                write_hf(checkpoint, dst, prefix=prefix, progress=progress)
            case "torch":
                from bytecheckpoint.formats.torch import write_torch

                write_torch(checkpoint, dst, progress=progress)
            case _:
                raise ConfigError(f"expected a format of {', '.join(TARGETS)}, got {to!r}")


def open_any(src: str | os.PathLike[str]) -> Checkpoint:
    """Opens what `bytecheckpoint.open` opens, and local files of torch.save.

    Raises:
        FileNotFoundError: there is nothing.
        DataError: it is damaged, or cannot be read by ranges.
    """
    from bytecheckpoint.loading import checkpoint as opened

    if not os.path.isfile(src):
        return opened.open(src)
    from bytecheckpoint.formats.torch import read_index
    from bytecheckpoint.loading.source import Source, Summary
    from bytecheckpoint.state.values import dump
    from bytecheckpoint.storage import open_storage

    folder, name = os.path.split(os.path.abspath(src))
    storage = open_storage(folder)
    index, tree = read_index(storage, name)
    extra = dump({"tree": tree, "ranks": {}, "trace": []})
    summary = Summary(kind="torch", folder="", index=index.encode(), extra=extra)
    return opened.Checkpoint(Source.of(storage, summary))
