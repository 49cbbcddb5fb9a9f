"""Ranks set aside for models: what shares a pool is colocated, what has one of its own runs apart.

After HybridFlow's ResourcePool (arXiv 2409.19256).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.workers.controller import Workers

__all__ = ["ResourcePool"]


@dataclass(frozen=True, eq=False, slots=True)
class ResourcePool:
    """Some ranks of the world of workers; made by `Workers.pool`.

    Attributes:
        workers: whose ranks they are.
        ranks: in the world.
    """

    workers: Workers
    ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """How many."""
        return len(self.ranks)
