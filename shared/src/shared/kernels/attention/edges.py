"""What attention reads: the edges of each root, with their features and spans of time."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["Edges"]


@runtime_checkable
class Edges(Protocol):
    """Who reads whom: the edges of each root beside one another."""

    @property
    def starts(self) -> Int64[Tensor, " num_roots_and_1"]:
        """Where each root's edges begin, and the number of all."""
        ...

    @property
    def neighbors(self) -> Int64[Tensor, " num_edges"]:
        """Rows of the neighbours."""
        ...

    @property
    def edge_rows(self) -> Float[Tensor, "num_features edge_dim"]:
        """Features of edges."""
        ...

    @property
    def edge_index(self) -> Int64[Tensor, " num_edges"]:
        """Which of them each edge has."""
        ...

    @property
    def dt(self) -> Float[Tensor, " num_edges"]:
        """Spans of time, float64."""
        ...
