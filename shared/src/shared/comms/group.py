"""Groups of ranks that exchange messages, over torch.distributed's process groups.

A `Group` carries what every exchange needs beside the process group: the ranks in the world, one
timeout as a timedelta, and the ledger in which bytes are counted. Groups are cached, so that
asking twice costs nothing and opens no further connection.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shared.comms.ledger import Ledger
from shared.errors import CommError, ConfigError

if TYPE_CHECKING:
    from shared.comms.tree import Tree

__all__ = ["Group", "init_from_env", "join", "leave", "open_store", "open_torchrun_store"]

_TORCHRUN_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Group:
    """Some ranks of the world, in an order, that exchange messages with one another.

    Attributes:
        process_group: torch.distributed's process group.
        ranks: ranks of the world, by rank in this group.
        rank: this process's rank in this group, -1 when it is no member.
        timeout: how long one message may take.
        ledger: where bytes are counted; the world's groups of one process share it.
        backend: "gloo" or "nccl".
        device: where tensors to be exchanged lie.
        tree: along which bytes travel, when the ranks have agreed on one; see `Tree.of`.
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
        self.tree: Tree | None = None
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._control: Group | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, ranks={list(self.ranks)}, backend={self.backend!r})"

    @property
    def world_size(self) -> int:
        """Number of ranks in this group."""
        return len(self.ranks)

    def checked(self) -> dist.ProcessGroup:
        """The process group, for an operation that only members may call.

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
        """The group of all ranks; one object until torch.distributed is initialised anew.

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
        """The group as torch's mesh of one axis, as FSDP2 and DTensor take it.

        Raises:
            ConfigError: if this process is not in the group.
        """
        return DeviceMesh.from_group(self.checked(), self.device.type)

    @staticmethod
    def exists() -> bool:
        """Whether this process is a rank: torch.distributed is there and initialised."""
        return dist.is_available() and dist.is_initialized()

    def board(self, name: str) -> Any:
        """A store that the group's ranks share, for what background threads leave to one another.

        It has a connection of its own: a thread that waits there holds up no other.

        Args:
            name: what is left under another name is not seen.

        Returns:
            A torch.distributed store.
        """
        store: Any = self.checked().get_group_store()
        return dist.PrefixStore(name, store.clone())

    @staticmethod
    def control() -> Group:
        """A gloo group of all ranks, apart from the one on which the caller's collectives run.

        For small messages and CPU tensors beside training: nothing sent here mixes with, or waits
        for, what the default group does, whatever its backend. Every rank of the world calls this
        the first time; later calls return the same group and communicate nothing.
        """
        world = Group.world()
        if world._control is None:
            process_group = dist.new_group(timeout=world.timeout, backend="gloo")
            assert isinstance(process_group, dist.ProcessGroup), "all ranks are members"
            world._control = Group(process_group, world.ranks, world.timeout, world.ledger)
        return world._control

    @staticmethod
    def of(ranks: Sequence[int], *, members_only: bool = False) -> Group:
        """The group of some ranks of the world, in ascending order.

        As torch.distributed.new_group asks, every rank of the world calls this, in the same order
        and whether it is a member or not; a rank outside gets a group whose `rank` is -1.

        Args:
            ranks: of the world.
            members_only: only the group's ranks call this, as where one controller asks some ranks
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
            # Outside the group torch gives a number in its place.
            mine = process_group if isinstance(process_group, dist.ProcessGroup) else None
            world._subgroups[key] = Group(mine, key, world.timeout, world.ledger)
        return world._subgroups[key]


def _join_equally_many(world: Group, ranks: Sequence[int]) -> None:
    """Has some ranks be in equally many process groups, by groups of their own if need be.

    torch names a group that only its members make after its ranks and how many groups a process is
    in: members that differ in this would wait for one another for ever, under two names.
    """
    me, board = dist.get_rank(), world.board(f"members/{list(ranks)}")
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


def init_from_env(timeout: timedelta = timedelta(minutes=5), backend: str | None = None) -> Group:
    """Join the ranks that torchrun started, from its environment variables.

    Does nothing but return the world when torch.distributed is initialised already, so that a
    script runs under torchrun and inside a RankPool alike.

    Args:
        timeout: how long one message may take.
        backend: "nccl" or "gloo"; by default NCCL where each local rank has a GPU of its own.

    Returns:
        The group of all ranks.

    Raises:
        ConfigError: if a variable is missing or the backend is unknown.
    """
    if dist.is_initialized():
        return Group.world()
    missing = [key for key in _TORCHRUN_KEYS if key not in os.environ]
    if missing:
        raise ConfigError(
            f"torchrun's environment is not there: {', '.join(missing)} unset; start the script "
            f"as `torchrun --nproc-per-node=2 script.py`, or use shared.comms.RankPool"
        )
    if backend not in (None, "nccl", "gloo"):
        raise ConfigError(f"backend must be 'nccl', 'gloo' or None, got {backend!r}")
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if backend is None:
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
        backend = "nccl" if has_gpus else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend, timeout=timeout)
    # Imported here because rounds are made of groups.
    from shared.comms.courier import connect

    connect(Group.world())
    return Group.world()


def open_store(host: str, timeout: timedelta) -> Any:
    """Opens a store in which ranks find one another, for a launcher that gives no address.

    Args:
        host: address of this process's host that the others reach.
        timeout: how long ranks wait there.

    Returns:
        A torch.distributed store that listens on a free `port` as long as it is kept.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def open_torchrun_store(name: str, timeout: timedelta) -> Any:
    """Opens the store that torchrun's environment names, where a job's processes find one another.

    Torchrun's agent keeps it, or if no agent does, the process whose RANK is 0.

    Args:
        name: what is left under another name, or in another attempt of the job, is not seen.
        timeout: how long ranks wait there.

    Returns:
        A torch.distributed store.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{name}/{attempt}", store)


def join(rank: int, world_size: int, store: Any, *, backend: str, timeout: timedelta) -> Group:
    """Becomes a rank of the world that meets in a store.

    Args:
        rank: of this process.
        world_size: ranks in all.
        store: what `open_store` or `open_torchrun_store` gave, or (host, port) of another process's.
        backend: "nccl" or "gloo".
        timeout: how long one message may take.

    Returns:
        The group of all ranks.
    """
    if isinstance(store, tuple):
        store = dist.TCPStore(*store, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # Imported here because rounds are made of groups.
    from shared.comms.courier import connect

    # Now, while all are there; who dies later is found by the closed connections.
    connect(Group.world())
    return Group.world()


def leave() -> None:
    """Is no rank any more; all ranks of the world call this, when nothing is under way."""
    dist.destroy_process_group()
