"""The sampled edges of one relation into a list of destination rows."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from shared.kernels.segment import CSR

__all__ = ["RelationEdges"]


@dataclass(frozen=True, slots=True, eq=False)
class RelationEdges:
    """Edges by position: sources in a list of rows, destinations in another, sorted by destination.

    Attributes:
        indptr: int64 [num_dst + 1], where each destination's edges begin.
        src: int64 [edges], positions of the sources.
        num_src: rows in the list of sources.
    """

    indptr: Int64[Tensor, " rows_and_one"]
    src: Int64[Tensor, " edges"]
    num_src: int
    _csr: list[CSR] = field(default_factory=list, init=False, repr=False)

    def to(self, device: torch.device) -> "RelationEdges":
        """These edges on a device, with the sparse matrix that was checked here."""
        if self.src.device == device:
            return self
        csr = self.csr.to(device)
        edges = RelationEdges(csr.indptr, csr.indices, self.num_src)
        edges._csr.append(csr)
        return edges

    @property
    def num_dst(self) -> int:
        """Rows in the list of destinations."""
        return len(self.indptr) - 1

    @property
    def dst(self) -> Int64[Tensor, " edges"]:
        """Positions of the destinations."""
        rows = torch.arange(self.num_dst, device=self.src.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=len(self.src))

    @property
    def edge_index(self) -> Int64[Tensor, "2 edges"]:
        """Sources and destinations, in the form that PyG's convolutions take."""
        return torch.stack([self.src, self.dst])

    @property
    def csr(self) -> CSR:
        """The edges as a sparse matrix [num_dst, num_src], made once."""
        if not self._csr:
            self._csr.append(CSR(self.indptr, self.src, self.num_src))
        return self._csr[0]
