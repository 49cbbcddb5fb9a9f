"""Becoming a rank of the world and leaving it again, however ranks are started.

`init_from_env` joins what torchrun started; `join` joins through a store, for launchers of one's own.
Both open the connections for rounds while all ranks are there: a rank that dies later is then found
by its closed connections.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared.comms.courier import connect
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["init_from_env", "join", "leave", "open_store", "open_torchrun_store"]

_TORCHRUN_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
    connect(Group.world())
    return Group.world()


def leave() -> None:
    """Is no rank any more; all ranks of the world call this, when nothing is under way."""
    dist.destroy_process_group()
