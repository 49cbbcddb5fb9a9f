"""Other formats of checkpoints: what a folder is, and conversion of any into any.

Readers make an index of the byte ranges of existing files, so that everything that reads our own
format by slices reads others by slices too. Writers stream, one piece of a tensor at a time.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from typing import Literal

from bytecheckpoint.storage import Storage
from shared.errors import ConfigError, DataError

__all__ = ["TARGETS", "Kind", "convert", "detect"]

Kind = Literal["native", "dcp", "huggingface", "torch"]
TARGETS = ("dcp", "safetensors", "torch")


def detect(storage: Storage, path: str = "") -> Kind:
    """What lies at a path, by the names of files there.

    Args:
        storage: where to look.
        path: a folder, or a file of torch.save.

    Raises:
        DataError: nothing that can be read.
    """
    names = storage.list(path)
    if "manifest.json" in names:
        return "native"
    if ".metadata" in names:
        return "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "huggingface"
    if not names and posixpath.splitext(path)[1] in (".pt", ".pth", ".bin", ".ckpt"):
        return "torch"
    raise DataError(
        f"{posixpath.join(storage.url, path)}: expected a checkpoint: a folder with manifest.json, "
        f".metadata (DCP) or *.safetensors, or a file .pt, .pth, .bin or .ckpt of torch.save; "
        f"found {', '.join(names[:5]) or 'nothing'}"
    )


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str,
    *,
    prefix: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint in another format, in memory of about 64 MiB.

    Args:
        src: path or URL of a checkpoint of any kind that `bytecheckpoint.open` takes.
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
    from bytecheckpoint import opened

    if "://" in os.fspath(dst):
        raise ConfigError(f"expected a local path to write to, got {os.fspath(dst)}")
    with opened.open(src) as checkpoint:
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
