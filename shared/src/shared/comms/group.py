"""Groups of ranks that exchange messages, over torch.distributed's process groups.

A `Group` holds a process group and what every exchange needs with it: the ranks in the world, one
timeout as a timedelta, and the ledger that counts bytes. Groups are cached: a second call returns
the same object and opens no further connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shared.comms.ledger import Ledger
from shared.errors import CommError, ConfigError

__all__ = ["Group", "ProcessGroup"]


class Group:
    """An ordered subset of the world's ranks that exchange messages.

    Attributes:
        process_group: torch.distributed's process group; None on a rank outside the group.
        ranks: ranks of the world, by rank in this group.
        rank: this process's rank in this group, -1 if it is not a member.
        timeout: how long one message may take.
        ledger: counts the bytes sent and received; all groups of one world share it.
        backend: "gloo" or "nccl".
        device: device on which tensors to be exchanged must lie.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        timeout: timedelta,
        ledger: Ledger,
    ) -> None:
        self.process_group = process_group
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.ledger = ledger
        me = dist.get_rank()
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        self.backend = "nccl" if "nccl" in dist.get_backend(process_group) else "gloo"
        is_cuda = self.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else _CPU
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._controls: dict[tuple[tuple[int, ...], str], Group] = {}
        self._mesh: DeviceMesh | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, ranks={list(self.ranks)}, backend={self.backend!r})"

    @property
    def world_size(self) -> int:
        """Number of ranks in this group."""
        return len(self.ranks)

    def checked(self) -> dist.ProcessGroup:
        """The process group, after checking that this process is a member.

        Raises:
            ConfigError: if this process is not in the group.
        """
        if self.process_group is None or self.rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the group of ranks {list(self.ranks)}; "
                f"only members exchange messages, so test `group.rank >= 0` first"
            )
        return self.process_group

    @staticmethod
    def world() -> Group:
        """The group of all ranks; the same object until torch.distributed is initialised again.

        Raises:
            CommError: if torch.distributed is not initialised.
        """
        global _world
        if not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialised in this process; call "
                "shared.comms.init_from_env() under torchrun, or run the function in a RankPool"
            )
        process_group = dist.group.WORLD
        assert process_group is not None, "initialised, so there is a world"
        if _world is None or _world.process_group is not process_group:
            ranks = range(dist.get_world_size())
            _world = Group(process_group, ranks, _timeout_of(process_group), Ledger())
        return _world

    def device_mesh(self) -> DeviceMesh:
        """The group as torch's one-dimensional DeviceMesh, for FSDP2 and DTensor.

        Raises:
            ConfigError: if this process is not in the group.
        """
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.checked(), self.device.type)
        return self._mesh

    def shard_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """A DTensor over the group, `Shard(0)`, of which each rank gives its rows; nothing is sent.

        Args:
            rows: this rank's, as many as `torch.chunk` would give it; not copied.
            like: a tensor of the shape and strides of the whole.

        Raises:
            ConfigError: if this process is not in the group.
        """
        # Imported here, as it takes longer than all of torch.distributed.
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(
            rows, self.device_mesh(), [Shard(0)],
            run_check=False, shape=like.shape, stride=like.stride(),
        )  # fmt: skip

    @staticmethod
    def exists() -> bool:
        """Whether this process is a rank: torch.distributed is available and initialised."""
        return dist.is_available() and dist.is_initialized()

    def board(self, name: str) -> Any:
        """A key-value store shared by the group's ranks, for messages between background threads.

        It has its own connection: a thread that waits on it does not block others.

        Args:
            name: prefix of the keys; stores of different names do not see each other's keys.

        Returns:
            A torch.distributed store.
        """
        store: Any = self.checked().get_group_store()
        return dist.PrefixStore(name, store.clone())

    @staticmethod
    def control(process_group: ProcessGroup | None = None, *, name: str = "") -> Group:
        """A gloo group of all ranks, or of a process group's, separate from the groups of training.

        For small messages and CPU tensors during training: its messages neither mix with nor wait
        for those of other groups, whatever their backend. The first call is collective: every rank
        of the group makes it, and no other. Later calls return the same group without
        communication.

        Args:
            process_group: whose ranks; None: those of the world.
            name: groups of different names are separate, as a thread that exchanges messages by itself
                needs one of its own.

        Raises:
            ConfigError: if this process is not in the process group.
        """
        world = Group.world()
        ranks = world.ranks
        if process_group is not None:
            # torch gives ranks outside a group an integer in its place.
            if not isinstance(process_group, ProcessGroup):
                raise ConfigError(
                    f"expected a process group that rank {dist.get_rank()} is in, got one of other "
                    f"ranks; let only its members take part"
                )
            ranks = tuple(sorted(dist.get_process_group_ranks(process_group)))
        key = ranks, name
        if key not in world._controls:
            is_part = ranks != world.ranks
            if is_part:
                _join_equally_many(world, ranks)
            made = dist.new_group(
                list(ranks),
                timeout=world.timeout,
                backend="gloo",
                use_local_synchronization=is_part,
            )
            assert isinstance(made, ProcessGroup), "only members call this"
            world._controls[key] = Group(made, ranks, world.timeout, world.ledger)
        return world._controls[key]

    @staticmethod
    def of(ranks: Sequence[int], *, members_only: bool = False) -> Group:
        """The group of some ranks of the world, in ascending order.

        As for torch.distributed.new_group, every rank of the world calls this, members or not, in
        the same order; a rank outside the group gets one whose `rank` is -1.

        Args:
            ranks: ranks of the world, in any order.
            members_only: only the group's ranks call this, as when one controller calls some ranks
                of many.

        Raises:
            ConfigError: if a rank is named twice or lies outside the world.
        """
        world = Group.world()
        key = tuple(sorted(ranks))
        if len(set(key)) != len(key) or not key or not set(key) <= set(world.ranks):
            raise ConfigError(
                f"a group needs different ranks of 0..{world.world_size - 1}, got {list(key)}"
            )
        if key == world.ranks:
            return world
        if key not in world._subgroups:
            if members_only and dist.get_rank() in key:
                _join_equally_many(world, key)
            process_group = dist.new_group(
                list(key), timeout=world.timeout, use_local_synchronization=members_only
            )
            # On ranks outside the group torch returns an integer, NON_GROUP_MEMBER.
            mine = process_group if isinstance(process_group, dist.ProcessGroup) else None
            world._subgroups[key] = Group(mine, key, world.timeout, world.ledger)
        return world._subgroups[key]


def _join_equally_many(world: Group, ranks: Sequence[int]) -> None:
    """Brings the ranks to the same number of process groups by making groups of one rank.

    torch names a group made by its members alone after its ranks and the number of groups that the
    process is in: members that differ in this number would wait forever under different names.
    """
    store: Any = world.checked().get_group_store()
    me, board = dist.get_rank(), dist.PrefixStore(f"members/{list(ranks)}", store)
    count = len(dist.distributed_c10d._world.pg_names)
    board.set(str(me), str(count))
    most = max(int(board.get(str(rank))) for rank in ranks)
    for _ in range(most - count):
        dist.new_group([me], use_local_synchronization=True)


_CPU = torch.device("cpu")
_world: Group | None = None


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    return process_group._get_backend(device).options._timeout
