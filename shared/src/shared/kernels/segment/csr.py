"""A sparse matrix in compressed rows, checked once and transposed once."""

from copy import copy
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shared.errors import DataError
from shared.kernels.registry import select

__all__ = ["CSR"]


@dataclass(frozen=True, slots=True, eq=False)
class CSR:
    """A sparse matrix whose row r holds the columns indices[indptr[r]:indptr[r + 1]].

    For a graph, rows are destinations and columns the sources of their in-edges. Duplicates and
    any order within a row are allowed. Contiguous tensors are taken as they are, not copied; do not
    write to them afterwards.

    Attributes:
        indptr: int64 [num_rows + 1], from 0 up to nnz.
        indices: int32 or int64 [nnz], each in [0, num_cols).
        num_cols: Number of columns.
        weight: A value for each entry [nnz], of any float type; None counts each as 1.
    """

    indptr: Int64[Tensor, " rows_and_one"]
    indices: Int[Tensor, " nnz"]
    num_cols: int
    weight: Float[Tensor, " weights"] | None = None
    # A list, since a frozen instance can still fill it.
    _transposed: list["CSR"] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the structure.

        Raises:
            DataError: A type, a length, the order of `indptr` or an index does not fit.
        """
        if self.indptr.dtype != torch.int64 or self.indptr.ndim != 1 or not len(self.indptr):
            raise DataError(
                f"expected indptr to be int64 [num_rows + 1], got {self.indptr.dtype} "
                f"{list(self.indptr.shape)}"
            )
        if self.indices.dtype not in (torch.int32, torch.int64) or self.indices.ndim != 1:
            raise DataError(
                f"expected indices to be int32 or int64 [nnz], got {self.indices.dtype} "
                f"{list(self.indices.shape)}"
            )
        if self.weight is not None and (
            self.weight.shape != self.indices.shape or not self.weight.is_floating_point()
        ):
            raise DataError(
                f"expected a float weight for each of {self.nnz} entries, got "
                f"{self.weight.dtype} {list(self.weight.shape)}"
            )
        first, last = int(self.indptr[0]), int(self.indptr[-1])
        if first != 0 or last != self.nnz or bool((self.indptr.diff() < 0).any()):
            raise DataError(
                f"expected indptr to rise from 0 to nnz = {self.nnz}, got {first} to {last}"
                + (", falling in between" if (first, last) == (0, self.nnz) else "")
            )
        if self.nnz:
            low, high = (int(bound) for bound in self.indices.aminmax())
            if low < 0 or high >= self.num_cols:
                raise DataError(
                    f"expected indices in [0, num_cols = {self.num_cols}), got {low} to {high}"
                )
        # The compiled forms step through them by address.
        for name in ("indptr", "indices", "weight"):
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.contiguous())

    @classmethod
    def from_coo(
        cls,
        dst: Int[Tensor, " nnz"],
        src: Int[Tensor, " nnz"],
        num_rows: int,
        num_cols: int,
        weight: Float[Tensor, " nnz"] | None = None,
    ) -> "CSR":
        """The matrix with an entry at (dst[i], src[i]) for every i, sorted within each row.

        Args:
            dst: Row of each entry, in [0, num_rows).
            src: Column of each entry, in [0, num_cols).
            num_rows: Number of rows.
            num_cols: Number of columns.
            weight: Value of each entry; None counts each as 1.

        Raises:
            DataError: Lengths differ or an id lies outside its range.
        """
        if dst.shape != src.shape or dst.ndim != 1:
            raise DataError(
                f"expected dst and src of one length, got {list(dst.shape)}, {list(src.shape)}"
            )
        # One row that holds every entry, transposed, is the entries sorted by column; sorting that
        # by row keeps the order of columns within each row.
        one_row = torch.tensor([0, len(src)], device=src.device)
        _, _, by_src = cls(one_row, src.contiguous(), num_cols)._transpose()
        by_dst = cls(one_row, dst[by_src], num_rows)
        indptr, _, order = by_dst._transpose()
        order = by_src[order]
        return cls(indptr, src[order], num_cols, None if weight is None else weight[order])

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.indices)

    def t(self) -> "CSR":
        """The transpose, computed once and kept; its transpose is this matrix."""
        if not self._transposed:
            indptr, indices, order = self._transpose()
            weight = None if self.weight is None else self.weight[order]
            other = CSR(indptr, indices, self.num_rows, weight)
            other._transposed.append(self)
            self._transposed.append(other)
        return self._transposed[0]

    def to(self, device: torch.device | str) -> "CSR":
        """This matrix on `device`; itself when it lies there already."""
        if self.indptr.device == torch.device(device):
            return self
        # A copy is not checked again: on a GPU each check would make the host wait.
        moved = copy(self)
        for name in ("indptr", "indices", "weight"):
            tensor = getattr(self, name)
            object.__setattr__(moved, name, None if tensor is None else tensor.to(device))
        object.__setattr__(moved, "_transposed", [])
        return moved

    def _transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        form = select("segment", self.indptr.device)
        return form.transpose(self.indptr, self.indices, self.num_cols)
