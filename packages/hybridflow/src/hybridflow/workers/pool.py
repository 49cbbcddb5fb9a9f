"""Resource pools: models on one pool share its ranks, models on different pools run at once.

After HybridFlow's ResourcePool (arXiv 2409.19256).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hybridflow.workers.dispatch import MethodRoute
from hybridflow.workers.future import Future, Joined

__all__ = ["Controller", "ResourcePool"]


@runtime_checkable
class Controller(Protocol):
    """What a pool and its groups need from the owner of the ranks; `Workers` implements it.

    Attributes:
        groups: worker groups on these ranks, in the order in which they were made.
    """

    groups: list[Any]

    def name(self, wanted: str) -> str:
        """A name that no group has yet."""
        ...

    def call(self, route: MethodRoute, args: tuple, kwargs: dict[str, Any]) -> Future:
        """Calls a method on the ranks of a group."""
        ...

    def wait_any(self, futures: Sequence[Future | Joined]) -> None:
        """Waits until one of the futures is done, or has failed."""


@dataclass(frozen=True, eq=False, slots=True)
class ResourcePool:
    """Some ranks of a controller; made by `Workers.pool`.

    Attributes:
        workers: the controller that owns the ranks.
        ranks: the pool's ranks in the world.
    """

    workers: Controller
    ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)
