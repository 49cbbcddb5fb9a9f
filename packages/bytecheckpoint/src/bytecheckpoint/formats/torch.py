"""Single files of torch.save, read in place by byte ranges.

The pickle in such a file describes the nested state, and names for each tensor the record of the
archive that holds its elements, which is enough to build an index. `torch.load` instead needs
memory for the whole file, or a memory map, which object stores lack.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.formats.archive import Archive
from bytecheckpoint.formats.dcp import locate_elements
from bytecheckpoint.formats.pickles import StoredTensor, load_tree
from bytecheckpoint.formats.ranges import Chunk, Window, build_index
from bytecheckpoint.formats.tree import encode
from bytecheckpoint.state.values import encode_leaf
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.index import File, Index, check_file_name
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["read_index"]

_log = logging.getLogger(__name__)


def read_index(storage: Storage, path: str) -> tuple[Index, dict[str, Any]]:
    """Reads the directory and the pickle of a file; no code that the pickle names is run.

    Args:
        storage: storage that holds it.
        path: path of the file. The index names it without its folder.

    Returns:
        The index, and the tree of everything else (see `bytecheckpoint.state.values`). Tensors are
        named by their keys joined with dots.

    Raises:
        DataError: it is no such file, is damaged, holds other objects than tensors, containers and
            plain values, or tensors that are no row-major arrays of their own.
    """
    window = Window(storage, path)
    file = check_file_name(posixpath.basename(path), path)
    archive = Archive(window.read, 0, window.num_bytes, path)
    found = load_tree(archive.read("data.pkl"), path)
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: expected a dictionary, got a {type(found).__name__}")
    stored: list[tuple[str, StoredTensor]] = []

    def leaf(value: Any, name: str) -> Any:
        if isinstance(value, StoredTensor):
            stored.append((name, value))
            return {"$tensor": name}
        try:
            return encode_leaf(value, name)
        except DataError as error:
            _log.warning("read as None: %s", error)
            return None

    tree = encode(found, "", leaf)
    if len({name for name, _ in stored}) != len(stored):
        raise DataError(
            f"{path}: expected names that differ, got two tensors of one name (keys joined by "
            f"dots); rename a key"
        )
    first: dict[StoredTensor, str] = {}
    aliases = {}
    for name, tensor in stored:
        known = first.setdefault(tensor, name)
        if known != name:
            aliases[name] = known
    chunks = [
        Chunk(
            name,
            Box((0,) * len(tensor.shape), tensor.shape),
            file,
            locate_elements(archive, tensor, f"{path}, tensor {name!r}"),
        )
        for tensor, name in first.items()
    ]
    tensors = {name: (tensor.dtype, tensor.shape) for tensor, name in first.items()}
    index = build_index(tensors, chunks, [File(file, window.num_bytes)], path, aliases)
    return index, tree
