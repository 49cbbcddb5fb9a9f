"""Registry of the formats of checkpoints beside our own: how each is recognised and read.

`bytecheckpoint.open`, and with it loading, `inspect`, `diff` and conversion, use this list. Writers
are listed under the same names in `bytecheckpoint.tools.writers.registry`, because reading does not
depend on writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.index import Index
from shared.registry import Registry

__all__ = ["FORMATS", "Format", "find_file_format", "find_folder_format"]


class Format(NamedTuple):
    """One format.

    Attributes:
        kind: value of `Checkpoint.kind` for this format.
        pattern: pattern of file names; a folder that holds such a file has this format.
        reader: called with a `Storage` and a path in it; returns the `Index` of the tensors, and
            the tree of everything else (see `bytecheckpoint.state.values`), None where the format
            holds tensors only. Raises DataError for what is damaged. A text "module:attribute" is
            imported when a checkpoint is read.
        is_file: a checkpoint is one file of this pattern instead of a folder.
    """

    kind: str
    pattern: str
    reader: str | Callable[[Storage, str], tuple[Index, Any]]
    is_file: bool = False

    def read(self, storage: Storage, path: str) -> tuple[Index, Any]:
        """Calls the reader."""
        if not isinstance(self.reader, str):
            return self.reader(storage, path)
        module, _, name = self.reader.partition(":")
        return getattr(import_module(module), name)(storage, path)


FORMATS: Registry[str, Format] = Registry("format")
FORMATS.add(
    "dcp",
    Format("dcp", ".metadata", "bytecheckpoint.formats.dcp:read_index"),
    "a folder of torch.distributed.checkpoint",
)
FORMATS.add(
    "safetensors",
    Format("hf", "*.safetensors", "bytecheckpoint.formats.hf:read_folder"),
    "a folder of safetensors files, as Hugging Face lays them out",
)
FORMATS.add(
    "torch",
    Format("torch", "*", "bytecheckpoint.formats.torch:read_index", is_file=True),
    "one file of torch.save",
)


def find_folder_format(names: Iterable[str]) -> Format | None:
    """Finds the format of a folder.

    Args:
        names: names of the files in it.

    Returns:
        The first format in the registry that has a file there, None if there is none.
    """
    names = list(names)
    for one in map(FORMATS.get, FORMATS):
        if not one.is_file and any(fnmatchcase(name, one.pattern) for name in names):
            return one
    return None


def find_file_format(name: str) -> Format | None:
    """Finds the format of a checkpoint that is one file of this name, None if there is none."""
    # The last in the registry first: files of torch.save have no ending of their own.
    for one in map(FORMATS.get, reversed(FORMATS.names())):
        if one.is_file and fnmatchcase(name, one.pattern):
            return one
    return None
