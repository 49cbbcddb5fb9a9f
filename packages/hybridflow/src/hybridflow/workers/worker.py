"""What a user's worker is made from: a class, one object of which sits on each rank of a group."""

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
    """Where a worker stands.

    Attributes:
        name: the group's.
        ranks: the group's ranks in the world of all workers.
        mesh: how it is laid out.
        rank: this worker's rank in the group.
    """

    name: str
    ranks: Sequence[int]
    mesh: Mesh
    rank: int = 0

    def at(self, world_rank: int) -> Context:
        """The same, for one of its ranks."""
        return replace(self, rank=list(self.ranks).index(world_rank))


class Worker:
    """Base of workers; methods marked by `hybridflow.remote` can be called on a group of them.

    Attributes:
        context: set before `__init__` runs.
    """

    context: Context

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self.context.rank

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
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
        """What this rank exchanges messages from: its GPU, or the CPU.

        Ranks without process groups take the GPU that is there.
        """
        if Group.exists() and Group.world().world_size > 1:
            return Group.world().device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def subgroup(self, axis: str) -> Group | None:
        """The ranks that differ from this one in an axis of training only, to communicate with.

        Args:
            axis: "pp", "tp", "dp", or "all" for the whole group.

        Returns:
            None where this rank is alone.

        Raises:
            ConfigError: if the group has several ranks, but its engine no process groups.
        """
        groups = [list(range(self.num_ranks))]
        if axis != "all":
            groups = self.context.mesh.train.groups(axis)
        return self.group_of(next(ranks for ranks in groups if self.rank in ranks))

    def group_of(self, ranks: Sequence[int]) -> Group | None:
        """A process group of some of this group's ranks, of which this is one; None if alone."""
        if len(ranks) == 1:
            return None
        if not Group.exists():
            raise ConfigError(
                f"{self.context.name} lies on {self.num_ranks} ranks that exchange messages, which "
                f"the inline engine does not offer; use Workers.local({self.num_ranks})"
            )
        world = [self.context.ranks[rank] for rank in ranks]
        return Group.of(world, members_only=True)

    def close(self) -> None:
        """Gives back what the worker holds; called when its group is removed."""
