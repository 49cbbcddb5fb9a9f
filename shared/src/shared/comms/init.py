"""Joining and leaving the world of ranks, under torchrun or another launcher.

`init_from_env` joins the ranks that torchrun started; `join` joins through a store, for custom
launchers. Both open the connections for rounds while all ranks are alive: a rank that dies later is
then detected by its closed connections.

A world that lost a rank is left by `abandon`, and the ranks that are left join the next one under
its *epoch*. A dead peer is no hindrance, but one that hangs, or whose network is cut, would hold
every rank that waits for it, and torch's `abort` frees none of them: what does is to shut down the
world's connections, which `sever` does from another thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.comms import courier
from shared.comms.courier import connect
from shared.comms.group import Group
from shared.errors import CommError, ConfigError

__all__ = [
    "abandon",
    "alone",
    "init_from_env",
    "is_message_failure",
    "join",
    "joined",
    "leave",
    "open_store",
    "open_torchrun_store",
    "recorded",
    "sever",
    "wait",
    "wait_in",
]

_REACH = timedelta(seconds=30)
"""A store that another process has opened is there, or will not come."""
_TORCHRUN_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def init_from_env(timeout: timedelta = timedelta(minutes=5), backend: str | None = None) -> Group:
    """Join the ranks that torchrun started, from its environment variables.

    If torch.distributed is already initialised, this only returns the world, so that a script runs
    under torchrun as in a RankPool.

    Args:
        timeout: how long one message may take.
        backend: "nccl" or "gloo"; by default NCCL if there is a GPU for each local rank.

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
            f"expected torchrun's environment variables, got {', '.join(missing)} unset; start the "
            f"script as `torchrun --nproc-per-node=2 script.py`, or use shared.comms.RankPool"
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
    """Opens a rendezvous store, for a launcher that provides none.

    Args:
        host: address of this process's host, reachable from the other ranks.
        timeout: how long an operation on the store may wait.

    Returns:
        A torch.distributed store that listens on a free port, its `port`, while it is referenced.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def open_torchrun_store(name: str, timeout: timedelta) -> Any:
    """Opens the rendezvous store that torchrun's environment variables name.

    Torchrun's agent hosts it, or without an agent the process whose RANK is 0.

    Args:
        name: prefix of the keys, together with the number of torchrun's restarts: stores of
            different names or attempts do not see each other's keys.
        timeout: how long an operation on the store may wait.

    Returns:
        A torch.distributed store.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{name}/{attempt}", store)


def join(
    rank: int,
    world_size: int,
    store: Any,
    *,
    backend: str,
    timeout: timedelta,
    epoch: int | None = None,
) -> Group:
    """Joins the world as one rank, with a store as rendezvous.

    Args:
        rank: this process's rank.
        world_size: number of ranks.
        store: the store of `open_store` or `open_torchrun_store`, or (host, port) of the one that
            another process opened.
        backend: "nccl" or "gloo".
        timeout: how long one message may take.
        epoch: number of this world, where the same store serves one after another: ranks of
            different epochs never meet.

    Returns:
        The group of all ranks.

    Raises:
        CommError: another process's store cannot be reached in time, 30 s at most.
    """
    global _num_peers
    _num_peers = world_size
    if isinstance(store, tuple):
        store = _reached(store, timeout)
    with recorded():
        if epoch is not None:
            store = dist.PrefixStore(f"epoch/{epoch}", store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        connect(Group.world())
    return Group.world()


def _reached(address: tuple[str, int], timeout: timedelta) -> Any:
    """The store that another process opened, over a connection of this world.

    It is recorded once it is whole: torch opens one anew that is shut down while it is made, waits
    longer each time, and may each time ask a name server, which can take it seconds.
    """
    before = _connections()
    limit = min(timeout, _REACH)
    try:
        store = dist.TCPStore(*address, timeout=limit)
    except dist.DistError as error:
        host, port = address
        raise CommError(
            f"expected the store in which ranks meet at {host}:{port} within "
            f"{limit.total_seconds():g} s, got {str(error).splitlines()[0]}; have this host reach that "
            f"port"
        ) from error
    store.set_timeout(timeout)
    _recorded.update(_connections() - before)
    return store


@contextmanager
def recorded() -> Iterator[None]:
    """Records the connections that are opened in the block as the world's, for `sever`.

    `join` does so; groups that are made later are made in such a block. Nothing else may open
    connections meanwhile, in any thread.
    """
    global _before
    _before = _connections()
    try:
        yield
    finally:
        _recorded.update(_connections() - _before)
        _before = None


def sever() -> None:
    """Shuts down the world's connections, from any thread: ranks that wait for messages raise.

    A join under way raises too; as it may go on to open connections, call this until it has.
    Connections that `recorded` has not seen stay, and so do listening sockets, without which gloo
    would end the process.
    """
    process_groups = [*dist.distributed_c10d._world.pg_map, *courier.channels()]
    before = _before
    under_way = set() if before is None else _connections() - before
    connections = _recorded | under_way
    # Whoever waits may go on to the next world from here on.
    now_s = time.monotonic()
    for process_group in process_groups:
        _severed.setdefault(process_group, now_s)
    courier.fail()
    # gloo waits for its thread, 10 ms at most, as it closes a connection: groups do so side by side.
    closing = [Thread(target=_close_pairs, args=(one,), daemon=True) for one in process_groups]
    for one in closing:
        one.start()
    for one in closing:
        one.join()
    for descriptor, inode in connections:
        with suppress(OSError):
            _shut_down(descriptor, inode)
    for descriptor, inode in under_way:
        with suppress(OSError):
            _stand_in(descriptor, inode)


def abandon() -> None:
    """Leaves a world whose peers are dead or hang, its couriers included; waits for none of them.

    Groups of that world are of no use afterwards. Without a world, or after a join that failed, this
    clears what is left of it.
    """
    sever()
    courier.abandon()
    if dist.is_initialized():
        dist.destroy_process_group()
    _recorded.clear()
    # A join that failed has counted its group, by whose number the ranks of the next one meet.
    dist.distributed_c10d._world.group_count = 0


def _close_pairs(process_group: dist.ProcessGroup) -> None:
    """Has gloo close all connections of a group from within, by a message that times out.

    A message that arrives for a buffer that a failed sum has freed stays unread, and gloo then sees
    neither later messages nor the end of that connection: whoever waits for it waits on. From without
    they are shut down only afterwards: an answer that gloo sends meanwhile would be queued, and forgotten.
    """
    # NCCL has no such receive.
    with suppress(RuntimeError):
        process_group.recv_anysource([torch.empty(1)], _UNUSED_TAG).wait(_AT_ONCE)


_UNUSED_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)
_PEER = struct.Struct("q")
"""What a peer that connects to gloo says first: its rank in the group."""
_CONNECT_S = 1.0
_DESCRIPTORS = "/proc/self/fd"
_LOOK = timedelta(milliseconds=50)
_GRACE_S = 0.1
"""What gloo does not forget has failed this long after its group was severed."""
_severed: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_unended: list[tuple[dist.ProcessGroup, dist.Work]] = []
_recorded: set[tuple[int, int]] = set()  # descriptor and inode: descriptors are used again
_before: set[tuple[int, int]] | None = None
_num_peers = 0


def _connections() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):
            kind, _, number = os.readlink(f"{_DESCRIPTORS}/{name}").partition(":")
            if kind == "socket":
                found.add((int(name), int(number.strip("[]"))))
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    with _duplicated(descriptor, inode) as connection:
        if connection is not None and not _listens(connection):
            connection.shutdown(socket.SHUT_RDWR)


def _stand_in(descriptor: int, inode: int) -> None:
    """Connects to a socket where gloo waits for peers, in place of all of them, and leaves at once.

    A group that is made waits for its peers' connections as long as for a message. One that has died
    meanwhile sends none, and there is nothing to shut down.
    """
    with _duplicated(descriptor, inode) as listener:
        if listener is None or not _listens(listener):
            return
        for number in range(_num_peers):
            with socket.create_connection(listener.getsockname()[:2], _CONNECT_S) as connection:
                connection.sendall(_PEER.pack(number))


@contextmanager
def _duplicated(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """A TCP socket of this process; None: the descriptor is another's by now, or of another kind."""
    copy = os.dup(descriptor)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as found:
        is_tcp = found.family != socket.AF_UNIX and found.type == socket.SOCK_STREAM
        yield found if is_tcp else None


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def leave() -> None:
    """Leaves the world; all ranks call this, when no messages are under way."""
    dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[Group]:
    """A gloo world of this process, which is left when the block ends; there is no other world meanwhile."""
    store = dist.HashStore()
    try:
        yield join(0, 1, store, backend="gloo", timeout=timedelta(minutes=1))
    finally:
        abandon()


@contextmanager
def joined(timeout: timedelta = timedelta(minutes=5)) -> Iterator[Group]:
    """The world of ranks, for a command that runs under torchrun or alone.

    Yields the world that there is already, else torchrun's, else a world of this process. What was
    joined here is left when the block ends; where it fails with others, they may hang, and to leave
    them would wait: then the process is expected to end.

    Args:
        timeout: how long one message may take in a world that is joined here.

    Raises:
        ConfigError: torchrun's variables are incomplete.
    """
    if Group.exists():
        yield Group.world()
        return
    if "WORLD_SIZE" in os.environ:
        group = init_from_env(timeout)
    else:
        group = join(0, 1, open_store("127.0.0.1", timeout), backend="gloo", timeout=timeout)
    try:
        yield group
    except BaseException:
        if group.world_size == 1:
            leave()
        raise
    leave()


def wait(work: dist.Work, process_group: dist.ProcessGroup) -> None:
    """Waits for the end of a collective of a gloo group, or of its world.

    When a connection ends, gloo fails the messages that wait for the other side, but forgets a send
    that is queued because the socket did not take it: whoever waits for it waits for its timeout.

    Raises:
        RuntimeError: gloo's, if a peer died or the timeout passed.
        CommError: the world was left.
    """
    while True:
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended between; else it raises what happened
                return
            since_s = _severed.get(process_group)
            if since_s is not None and time.monotonic() - since_s > _GRACE_S:
                # A group that nobody refers to waits for its threads, one of which never ends.
                _unended.append((process_group, work))
                raise CommError("the world was left while a message was under way") from None
        else:
            return


def wait_in(module: nn.Module) -> None:
    """Has FSDP2 wait for the messages of a module, and of those in it, by `wait`; over gloo only."""
    from torch.distributed.fsdp import FSDPModule  # slow, and whoever has such a module has it

    gather: Any = _AllGather()
    scatter: Any = _ReduceScatter()
    for one in module.modules():
        if isinstance(one, FSDPModule):
            # Not where a module has several meshes.
            with suppress(ValueError):
                one.set_custom_all_gather(gather)
                one.set_custom_reduce_scatter(scatter)


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gathers, at once."""
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)
        assert work is not None, "this rank is in the group"
        wait(work, group)


class _ReduceScatter(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces and scatters, at once."""
        # gloo's own is this sum too, but waits for its end however short the look is to be.
        whole = input_tensor.clone()
        work = dist.all_reduce(whole, op, group, async_op=True)
        assert work is not None, "this rank is in the group"
        wait(work, group)
        begin = dist.get_rank(group) * output_tensor.numel()
        part = whole.view(-1)[begin : begin + output_tensor.numel()]
        output_tensor.copy_(part.view(output_tensor.shape))


def is_message_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is a message's that failed.

    gloo's are plain RuntimeErrors, which name the line of gloo's code that they come from.
    """
    while error is not None:
        if isinstance(error, CommError | dist.DistError) or "gloo" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
