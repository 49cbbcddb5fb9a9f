"""An open checkpoint, to inspect it and to read slices: `bcp.open(path)["name"][a:b]`."""

from __future__ import annotations

import os
import posixpath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bytecheckpoint.formats.registry import find_file_format
from bytecheckpoint.loading.reader import (
    Unit,
    copy_parts,
    find_held_boxes,
    list_wants,
    match_parts,
    plan_units,
    read_units,
)
from bytecheckpoint.loading.source import Source, open_source, read_summary, split_url
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.state.values import decode_tree
from bytecheckpoint.storage import Storage, open_storage
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import Index
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["Checkpoint", "View", "open", "open_any", "open_in"]


class View:
    """A stored tensor; slicing it reads only the bytes that the slice needs.

    Attributes:
        name: name of the tensor.
        shape: shape of the whole tensor.
        dtype: type of its elements.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        index = checkpoint.index
        at = index.position[name]
        self.name = name
        self.shape = index.shapes[at]
        self.dtype = parse_dtype(index.dtypes[at])
        self._checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"View({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> Tensor:
        """Reads a slice, indexed as a tensor with integers, slices and `...`.

        Raises:
            IndexError: there is no such element.
            DataError: a block read for it is damaged.
        """
        keys: list[Any] = list(key) if isinstance(key, tuple) else [key]
        if ... in keys:
            at = keys.index(...)
            keys[at : at + 1] = [slice(None)] * (len(self.shape) - len(keys) + 1)
        if len(keys) > len(self.shape):
            raise IndexError(f"{self.name}: {len(keys)} indices of {len(self.shape)} dimensions")
        keys += [slice(None)] * (len(self.shape) - len(keys))
        offsets, sizes, after = [], [], []
        for d, (one, size) in enumerate(zip(keys, self.shape, strict=True)):
            if isinstance(one, slice):
                positions = range(size)[one]
                low = min(positions, default=0)
                offsets.append(low)
                sizes.append(max(positions, default=low - 1) - low + 1)
                after.append(slice(None, None, abs(positions.step)))
                if positions.step < 0:
                    raise IndexError(f"{self.name}: expected a step above 0, got {one.step}")
            else:
                try:
                    offsets.append(range(size)[one])
                except IndexError:
                    raise IndexError(
                        f"{self.name}: index {one} of dimension {d}, which has {size}"
                    ) from None
                sizes.append(1)
                after.append(0)
        box = Box(tuple(offsets), tuple(sizes))
        return self._checkpoint.read(self.name, box)[tuple(after)]


class Checkpoint:
    """An open checkpoint; close it, or use it in a `with` block.

    Attributes:
        source: reader of its files.
        kind: its format: "native", "dcp", "hf" or "torch".
        step: step of training, None where it does not say.
        world_size: ranks that wrote it.
        trace: times of the reads.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kind = source.summary.kind
        self.step = source.summary.step
        self.world_size = source.summary.world_size
        self.trace = Trace(0)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({posixpath.join(self.source.storage.url, self.source.summary.folder)}, "
            f"{len(self.names)} tensors, {self.index.total_bytes} bytes)"
        )

    def __contains__(self, name: str) -> bool:
        return name in self.index.position

    def __getitem__(self, name: str) -> View:
        """A tensor by name; reads nothing yet.

        Raises:
            KeyError: there is none; the message lists similar names.
        """
        if name not in self:
            tail = name.rpartition(".")[2]
            similar = [known for known in self.names if known.endswith(tail)][:3]
            hint = f"; there are {', '.join(similar)}" if similar else ""
            raise KeyError(f"{name!r} is not in this checkpoint{hint}")
        return View(self, name)

    @property
    def index(self) -> Index:
        """Which bytes of which file hold each tensor."""
        return self.source.index

    @property
    def names(self) -> list[str]:
        """Names of all tensors, tied ones included."""
        return [*self.index.names, *self.index.aliases]

    @property
    def extra(self) -> Any:
        """The nested non-tensor values of the state, with views in place of tensors."""
        return decode_tree(self.source.extra["tree"], self.__getitem__, is_plain=True)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Reads a tensor or a box of it.

        Raises:
            KeyError: there is no such tensor.
            DataError: the box exceeds the tensor, or a block read for it is damaged.
        """
        view = self[name]
        box = box or Box((0,) * len(view.shape), view.shape)
        ends = zip(box.offsets, box.sizes, view.shape, strict=True)
        if any(start < 0 or size < 0 or start + size > limit for start, size, limit in ends):
            raise DataError(f"{name}: expected a box within {list(view.shape)}, got {box}")
        values = torch.empty(box.sizes, dtype=view.dtype)
        wants = list_wants(self.index, [(name, box)])

        def use(unit: Unit, buffer: Tensor) -> None:
            for at in unit.wants:
                held = find_held_boxes(self.source, unit, wants[at].row, buffer)
                copy_parts(match_parts(held, wants[at], box, values))

        read_units(self.source, plan_units(self.source, wants), use, self.trace)
        return values

    def close(self) -> None:
        """Closes files and connections."""
        self.source.storage.close()


def open(path: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint: ours, a folder of torch's DCP, or one of safetensors files.

    Args:
        path: path of its folder, or a URL that fsspec opens.
        verify: compare blocks with their checksums where there are any.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DataError: its manifest, index or values file is damaged.
    """
    root, name = split_url(os.fspath(path))
    return open_in(open_storage(root), name, verify=verify)


def open_any(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens what `open` opens, and also local single-file checkpoints, as torch.save writes.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DataError: it is damaged, or cannot be read by byte ranges.
    """
    if not os.path.isfile(path):
        return open(path)
    folder, name = os.path.split(os.path.abspath(path))
    other = find_file_format(name)
    if other is None:
        raise DataError(f"{path}: expected a checkpoint, got a file of no format that can be read")
    storage = open_storage(folder)
    return Checkpoint(Source.of(storage, read_summary(other, storage, name, folder="")))


def open_in(storage: Storage, path: str, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint in a storage, as `open` does."""
    return Checkpoint(Source.of(storage, open_source(storage, path), verify=verify))
