"""Feature matrices in files: local ones are memory-mapped, remote ones read by ranges of rows.

A local file is mapped read-only, so that it may be larger than memory and processes share its
pages. Remote files are any that fsspec reaches: a small matrix is read once; of a large one each
call reads the requested rows, nearby rows in one request, and keeps none; put a `FeatureCache` in
front of it.
"""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Int64, Shaped
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.units import KiB, MiB

__all__ = ["RemoteMatrix", "open_matrix", "view_array"]

# A request takes about as long as transferring this many bytes, so shorter gaps are read too.
_GAP_BYTES = 64 * KiB
# Smaller matrices are read whole, which saves a request per batch.
_WHOLE_BYTES = 16 * MiB
_HEADER_BYTES = 64 * KiB
# Types that torch can gather, by their safetensors names.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NUMPY_TYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Position of a matrix in its file: row by row from byte `start` on."""

    dtype: torch.dtype
    shape: tuple[int, int]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes


class RemoteMatrix:
    """A matrix in a remote file, read by ranges of bytes.

    Args:
        fs: fsspec file system.
        path: path of the file in `fs`.
        layout: position of the matrix in the file.
        whole_bytes: a matrix up to this size is read whole, at the first call.
        gap_bytes: gaps between requested rows up to this size are read too, which saves requests.

    Attributes:
        shape: rows and columns.
    """

    def __init__(
        self, fs: Any, path: str, layout: _Layout, *, whole_bytes: int, gap_bytes: int
    ) -> None:
        self.shape = layout.shape
        self._whole_bytes, self._gap_bytes = whole_bytes, gap_bytes
        self._fs, self._path, self._layout = fs, path, layout
        self._whole: Tensor | None = None

    def gather(self, ids: Int64[Tensor, " n"]) -> Shaped[Tensor, "n dim"]:
        """Rows by id, in the file's type; ids must be in range.

        Raises:
            DataError: the file became shorter.
            OSError: the file system failed.
        """
        layout = self._layout
        if layout.num_bytes <= self._whole_bytes:
            if self._whole is None:
                self._whole = self._read([0], [layout.shape[0]])
            return self._whole[ids]
        wanted, place = torch.unique(ids, return_inverse=True)
        if not len(wanted):
            return torch.empty((0, layout.shape[1]), dtype=layout.dtype)
        is_cut = (wanted.diff() - 1) * layout.row_bytes > self._gap_bytes
        edge = torch.ones(1, dtype=torch.bool)
        begins = wanted[torch.cat([edge, is_cut])]
        ends = wanted[torch.cat([is_cut, edge])] + 1
        # The ranges read are concatenated.
        shift = begins - torch.cat([begins.new_zeros(1), (ends - begins).cumsum(0)[:-1]])
        range_of = torch.cat([begins.new_zeros(1), is_cut.cumsum(0)])
        rows = self._read(begins.tolist(), ends.tolist())
        return rows[(wanted - shift[range_of])[place]]

    def _read(self, begins: list[int], ends: list[int]) -> Tensor:
        """Rows of ranges, one after the other."""
        start, row_bytes = self._layout.start, self._layout.row_bytes
        pieces = self._fs.cat_ranges(
            [self._path] * len(begins),
            [start + row * row_bytes for row in begins],
            [start + row * row_bytes for row in ends],
            on_error="raise",
        )
        for begin, end, piece in zip(begins, ends, pieces, strict=True):
            if len(piece) != (end - begin) * row_bytes:
                raise DataError(
                    f"{self._path}: expected {(end - begin) * row_bytes} bytes for rows {begin} to "
                    f"{end - 1}, got {len(piece)}; the file was replaced or cut, open it again"
                )
        data = bytearray().join(pieces)
        return _rows_of(np.frombuffer(data, dtype=np.uint8), self._layout.dtype, self.shape[1])


def open_matrix(
    location: str, *, whole_bytes: int = _WHOLE_BYTES, gap_bytes: int = _GAP_BYTES
) -> Tensor | RemoteMatrix:
    """Opens a feature matrix, and reads its header only.

    Args:
        location: path or URL of a `.npy` file, or of a `.safetensors` file followed by `::` and the
            name of a tensor, which may be left out where there is only one.
        whole_bytes: a remote matrix up to this size is read whole, at the first call.
        gap_bytes: gaps between requested rows up to this size are read too, which saves requests.

    Raises:
        ConfigError: the name has none of these forms, or fsspec does not know the protocol.
        DataError: the file or tensor does not exist, is no matrix of numbers, or is truncated.
    """
    url, name = _split(location)
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url}: expected a path or a URL that fsspec reaches ({error}); check the protocol, "
            "or install its package"
        ) from error
    try:
        num_bytes = fs.size(path)
        head = fs.cat_file(path, start=0, end=_HEADER_BYTES)
        if name is None:
            layout = _npy_layout(url, head)
        else:
            length = int.from_bytes(head[:8], "little")
            if len(head) < 8 or 8 + length > num_bytes:
                raise DataError(f"{url}: expected a safetensors file, the header is cut or damaged")
            if 8 + length > len(head):
                head = fs.cat_file(path, start=0, end=8 + length)
            layout = _safetensors_layout(url, head[8 : 8 + length], name)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{url}: expected a file, there is none; check the path") from error
    if layout.start + layout.num_bytes > num_bytes:
        raise DataError(
            f"{url}: expected {layout.start + layout.num_bytes} bytes, got {num_bytes}; the file is "
            "cut, fetch it again"
        )
    if not isinstance(fs, LocalFileSystem):
        return RemoteMatrix(fs, path, layout, whole_bytes=whole_bytes, gap_bytes=gap_bytes)
    if not layout.num_bytes:
        return torch.empty(layout.shape, dtype=layout.dtype)
    data = np.memmap(path, np.uint8, "r", layout.start, (layout.num_bytes,))
    return _rows_of(data, layout.dtype, layout.shape[1])


def view_array(array: np.ndarray) -> Tensor:
    """A tensor that shares an array's memory; do not write to it.

    Raises:
        TypeError: torch does not support the array's type.
        ValueError: torch does not support the array's strides or byte order.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _rows_of(data: np.ndarray, dtype: torch.dtype, dim: int) -> Tensor:
    return view_array(data).view(dtype).view(-1, dim)


def _split(location: str) -> tuple[str, str | None]:
    """URL, and for safetensors the name of the tensor, empty where it is left out."""
    if location.endswith(".npy"):
        return location, None
    if location.endswith(".safetensors"):
        return location, ""
    url, mark, name = location.rpartition(".safetensors::")
    if mark:
        return f"{url}.safetensors", name
    raise ConfigError(
        f"expected the path of a .npy file or '<path>.safetensors::<tensor>', got {location!r}"
    )


def _npy_layout(url: str, head: bytes) -> _Layout:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, kind = read(stream)
    except (KeyError, ValueError) as error:
        raise DataError(f"{url}: expected a .npy file of numbers: {error}") from error
    if is_fortran and min(shape, default=0) > 1:
        raise DataError(
            f"{url}: expected rows in C order, got Fortran order; save np.ascontiguousarray(x)"
        )
    if kind.str not in _NUMPY_TYPES:
        raise DataError(
            f"{url}: expected a type that torch supports, got {kind}; save it as float32"
        )
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    return _Layout(dtype, _matrix_shape(url, shape), stream.tell())


def _safetensors_layout(url: str, header: bytes, name: str) -> _Layout:
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        if not name and len(tensors) == 1:
            name = next(iter(tensors))
        if name not in tensors:
            raise DataError(
                f"{url}: expected '::' and the name of a tensor, got {name!r}; there are "
                f"{', '.join(sorted(tensors)[:20])}"
            )
        entry = tensors[name]
        begin, end = (int(at) for at in entry["data_offsets"])
        kind, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{url}: expected the header of a safetensors file: {error}") from error
    if kind not in _TYPES:
        raise DataError(f"{url}::{name}: expected one of {', '.join(_TYPES)}, got {kind}")
    layout = _Layout(_TYPES[kind], _matrix_shape(f"{url}::{name}", shape), 8 + len(header) + begin)
    if begin < 0 or end - begin != layout.num_bytes:
        raise DataError(
            f"{url}::{name}: expected {layout.num_bytes} bytes of {kind} {list(shape)}, got "
            f"offsets {begin} to {end}; save the file again"
        )
    return layout


def _matrix_shape(where: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or shape[1] < 1 or shape[0] < 0:
        raise DataError(f"{where}: expected a matrix [rows, at least 1], got {list(shape)}")
    return shape[0], shape[1]
