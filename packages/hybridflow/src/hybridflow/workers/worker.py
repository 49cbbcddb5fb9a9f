"""Base class of workers; a group has one worker object on each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hybridflow.workers.batch.layout import GenerationCoordinates
from hybridflow.workers.protocols import Mesh
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["Context", "Worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A worker's group, and its rank in it.

    Attributes:
        name: the group's name.
        ranks: the group's ranks in the world of all workers.
        mesh: the group's layout.
        rank: this worker's rank in the group.
    """

    name: str
    ranks: Sequence[int]
    mesh: Mesh
    rank: int = 0

    def at(self, world_rank: int) -> Context:
        """The context of the group's worker on a rank of the world."""
        return replace(self, rank=list(self.ranks).index(world_rank))


class Worker:
    """Base of workers; methods marked by `hybridflow.remote` can be called on a group of them.

    Attributes:
        context: the worker's group and rank; set before `__init__` runs.
    """

    context: Context

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self.context.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return len(self.context.ranks)

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """Stage, shard and replica in training."""
        return self.context.mesh.train.coordinates(self.rank)

    @property
    def generation(self) -> GenerationCoordinates:
        """Stage, shard and replica in generation."""
        return self.context.mesh.generate.coordinates(self.rank)

    @property
    def device(self) -> torch.device:
        """The device of this rank's messages: its GPU, or the CPU.

        Without process groups it is the GPU if there is one.
        """
        if Group.exists() and Group.world().world_size > 1:
            return Group.world().device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def subgroup(self, axis: str) -> Group | None:
        """Process group of the ranks that differ from this one only in one axis of training.

        Args:
            axis: "pp", "tp", "dp", or "all" for the whole group.

        Returns:
            None where this rank is alone.

        Raises:
            ConfigError: if the group has several ranks, and its engine no process groups.
        """
        groups = [list(range(self.num_ranks))]
        if axis != "all":
            groups = self.context.mesh.train.groups(axis)
        return self.group_of(next(ranks for ranks in groups if self.rank in ranks))

    def group_of(self, ranks: Sequence[int]) -> Group | None:
        """Process group of some of the group's ranks, this one among them; None if alone.

        Raises:
            ConfigError: there are several ranks, and their engine has no process groups.
        """
        if len(ranks) == 1:
            return None
        if not Group.exists():
            raise ConfigError(
                f"{self.context.name} has {self.num_ranks} ranks that exchange messages, which "
                f"the inline engine does not support; use Workers.local({self.num_ranks})"
            )
        world = [self.context.ranks[rank] for rank in ranks]
        return Group.of(world, members_only=True)

    def close(self) -> None:
        """Releases the worker's resources; called when its group is removed."""
