"""Features of nodes and edges, one row per id, in memory, files or URLs; rows can be appended."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from gnnflow.features.files import RemoteMatrix, open_matrix, view_array
from shared.errors import ConfigError, DataError
from shared.kernels.gather import gather

__all__ = ["FeatureStore", "Features", "Kind", "check_ids"]

Kind = Literal["node", "edge"]
_Source = Tensor | np.ndarray | str | os.PathLike

_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


@runtime_checkable
class Features(Protocol):
    """Interface of feature stores: `FeatureStore`, or `DistributedFeatures` over ranks."""

    def dim(self, kind: Kind) -> int:
        """Columns of a kind; 0 where it has no features."""
        ...

    def num_rows(self, kind: Kind) -> int:
        """Rows of a kind, which may grow."""
        ...

    def gather(self, kind: Kind, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of ids as float32, into `out` where it is given."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """Rows as they were given, and those appended since."""

    base: Tensor | RemoteMatrix
    tail: Tensor  # float32, with room at its end
    num_rows: int

    @property
    def dim(self) -> int:
        return self.tail.shape[1]


class FeatureStore:
    """Rows of features of nodes and edges; row i belongs to id i.

    What is given is not copied: it stays in its memory, in its file or at its URL, and must not
    change afterwards. Rows appended are kept in memory as float32. One thread may append while others
    gather.

    A source is a matrix [rows, dim] of numbers: a tensor (rows then come from its device); a numpy
    array or memmap; or the path or fsspec URL of a `.npy` file, or of a safetensors file with the
    tensor's name, `path.safetensors::name`. Local files are memory-mapped and read as rows are asked
    for. Remote matrices up to 16 MiB are read once, at the first call; of larger ones every call reads
    ranges that cover the rows asked for, with gaps of up to 64 KiB between them, so that a
    `FeatureCache` in front pays.

    Args:
        node: features of nodes, None for none (they may still be appended).
        edge: features of edges, by edge id.

    Raises:
        ConfigError: a path of no known form, or a protocol fsspec does not know.
        DataError: no matrix of numbers, no such file or tensor, or a cut file.
    """

    def __init__(self, node: _Source | None = None, edge: _Source | None = None) -> None:
        given = {"node": node, "edge": edge}
        self._matrices = {
            kind: _matrix_of(kind, source) for kind, source in given.items() if source is not None
        }

    @property
    def node_dim(self) -> int:
        """Columns of the node features; 0 where there are none."""
        return self.dim("node")

    @property
    def edge_dim(self) -> int:
        """Columns of the edge features; 0 where there are none."""
        return self.dim("edge")

    @property
    def num_nodes(self) -> int:
        """Rows of node features."""
        return self.num_rows("node")

    @property
    def num_edges(self) -> int:
        """Rows of edge features."""
        return self.num_rows("edge")

    def dim(self, kind: Kind) -> int:
        """Columns of a kind; 0 where it has no features."""
        matrix = self._matrix(kind)
        return 0 if matrix is None else matrix.dim

    def num_rows(self, kind: Kind) -> int:
        """Rows of a kind."""
        matrix = self._matrix(kind)
        return 0 if matrix is None else matrix.num_rows

    def gather(
        self,
        kind: Kind,
        ids: Int64[Tensor, " n"],
        out: Float32[Tensor, "n dim"] | None = None,
    ) -> Float32[Tensor, "n dim"]:
        """Rows of ids, in their order, repeats included.

        Args:
            kind: "node" or "edge".
            ids: int64 [n], each in [0, num_rows).
            out: float32 [n, dim] to write to, on the rows' device.

        Returns:
            `out`, or new rows.

        Raises:
            ConfigError: no such kind.
            DataError: the kind has no features, an id has no row, or `out` does not fit.
            OSError: a remote file system failed.
        """
        check_ids(self, kind, ids)
        matrix = self._matrix(kind)
        assert matrix is not None, "no features have no row that an id could be of"
        num_base = matrix.base.shape[0]
        ids = ids.to(matrix.tail.device)
        if out is None:
            out = matrix.tail.new_empty((len(ids), matrix.dim))
        elif (out.dtype, out.device, *out.shape) != (
            torch.float32,
            ids.device,
            len(ids),
            matrix.dim,
        ):
            raise DataError(
                f"expected out float32 {[len(ids), matrix.dim]} on {ids.device}, got {out.dtype} "
                f"{list(out.shape)} on {out.device}"
            )
        if num_base == matrix.num_rows:
            return _gather_base(matrix.base, ids, out)
        if num_base == 0:
            return gather(matrix.tail, ids, out)
        is_new = ids >= num_base
        old, new = (~is_new).nonzero()[:, 0], is_new.nonzero()[:, 0]
        rows = out.new_empty((len(old), matrix.dim))
        out.index_copy_(0, old, _gather_base(matrix.base, ids[old], rows))
        return out.index_copy_(0, new, matrix.tail.index_select(0, ids[new] - num_base))

    def append(self, kind: Kind, rows: Shaped[Tensor, "n dim"] | np.ndarray) -> None:
        """Adds rows for the next ids; the first rows of a kind decide its columns.

        Takes time in proportion to the new rows, amortised.

        Args:
            kind: "node" or "edge".
            rows: numbers [n, dim], kept as float32.

        Raises:
            ConfigError: no such kind.
            DataError: no matrix of numbers, or of other columns than the rows there are.
        """
        matrix = self._matrix(kind)
        new = _tensor_of(kind, rows)
        if matrix is None:
            empty = torch.empty((0, new.shape[1]), dtype=torch.float32)
            matrix = _Matrix(empty, empty, 0)
        if new.shape[1] != matrix.dim:
            raise DataError(
                f"expected {kind} rows of {matrix.dim} columns, as those there are, got "
                f"{list(new.shape)}"
            )
        num_rows = matrix.num_rows + len(new)
        first = matrix.num_rows - matrix.base.shape[0]
        tail = matrix.tail
        if first + len(new) > len(tail):
            # Tensors made in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                tail = tail.new_empty((max(first + len(new), 2 * len(tail)), matrix.dim))
            tail[:first] = matrix.tail[:first]
        tail[first : first + len(new)] = new
        # Concurrent readers see either the old rows or all rows.
        self._matrices[kind] = replace(matrix, tail=tail, num_rows=num_rows)

    def _matrix(self, kind: str) -> _Matrix | None:
        if kind not in ("node", "edge"):
            raise ConfigError(f"expected kind 'node' or 'edge', got {kind!r}")
        return self._matrices.get(kind)


def check_ids(features: Features, kind: Kind, ids: Tensor) -> None:
    """Checks that ids have rows.

    Raises:
        DataError: one has none; the message names the kind, the id and the number of rows.
    """
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise DataError(f"expected {kind} ids int64 [n], got {ids.dtype} {list(ids.shape)}")
    if not features.dim(kind):
        raise DataError(
            f"expected {kind} features for {len(ids)} ids, but there are none; give "
            f"FeatureStore(..., {kind}=rows), or append them"
        )
    if not len(ids):
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    num_rows = features.num_rows(kind)
    if low < 0 or high >= num_rows:
        raise DataError(
            f"expected {kind} ids in [0, {num_rows}), got {low if low < 0 else high}: there are "
            f"{num_rows} rows of {kind} features; append the missing ones first"
        )


def _gather_base(base: Tensor | RemoteMatrix, ids: Tensor, out: Tensor) -> Tensor:
    return out.copy_(base.gather(ids)) if isinstance(base, RemoteMatrix) else gather(base, ids, out)


def _matrix_of(kind: str, source: _Source) -> _Matrix:
    if isinstance(source, str | os.PathLike):
        base = open_matrix(os.fspath(source))
    else:
        base = _tensor_of(kind, source)
    device = base.device if isinstance(base, Tensor) else None
    tail = torch.empty((0, base.shape[1]), dtype=torch.float32, device=device)
    return _Matrix(base, tail, base.shape[0])


def _tensor_of(kind: str, source: Tensor | np.ndarray) -> Tensor:
    if isinstance(source, np.ndarray):
        try:
            source = view_array(source)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"expected {kind} features of a type that torch supports: {error}"
            ) from error
    if not isinstance(source, Tensor):
        raise DataError(
            f"expected {kind} features as a tensor, a numpy array or a path, got "
            f"{type(source).__name__}"
        )
    if source.ndim != 2 or source.shape[1] < 1:
        raise DataError(
            f"expected {kind} features [rows, at least 1 column], got {list(source.shape)}; a "
            "single column is x[:, None]"
        )
    if source.dtype not in _TYPES:
        raise DataError(f"expected {kind} features as real numbers, got {source.dtype}")
    return source.detach()
