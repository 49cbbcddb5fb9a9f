"""Collectives over a `Group`: checked, timed out, counted in the ledger.

These wrap torch.distributed's collectives and add: the bytes that each rank moves (by gloo's
algorithm: ring for all-reduce and all-gather, binomial tree for broadcast), exchanges of unequal
sizes as rounds of point-to-point messages, and errors that name rank, operation and phase. gloo's
own all-to-all sends to all peers at once and reached half of the link's rate, rounds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shared.comms.courier import post_rounds, run_rounds
from shared.comms.group import Group
from shared.comms.init import wait
from shared.comms.rounds import PendingRounds, Round, ring_rounds
from shared.errors import CommError, ConfigError

__all__ = [
    "PendingRounds",
    "Reduction",
    "Round",
    "all_gather",
    "all_gather_into",
    "all_gather_v",
    "all_reduce",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "bucket_sum",
    "gather_v",
    "post_rounds",
    "scatter_v",
    "start_all_reduce",
]

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# A type's index here is sent ahead of a tensor whose size and type the receiver does not know.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def all_reduce(
    group: Group, tensor: Tensor, op: Literal["sum", "max", "min", "product"] = "sum"
) -> Tensor:
    """Reduce a tensor over all ranks, in place.

    Args:
        group: group whose ranks take part.
        tensor: same shape and type on every rank; holds the result afterwards.
        op: the reduction.

    Returns:
        The tensor given.

    Raises:
        ConfigError: if `op` is unknown.
        CommError: if a peer died or the timeout passed.
    """
    if op not in _REDUCTIONS:
        raise ConfigError(f"op must be one of {', '.join(_REDUCTIONS)}, got {op!r}")
    process_group = group.checked()
    with _failures_named(group, "all_reduce"):
        dist.all_reduce(tensor, _REDUCTIONS[op], process_group)
    size = group.world_size
    _record_ring(group, "all_reduce", 2 * (size - 1) * _num_bytes(tensor) // size)
    return tensor


class Reduction:
    """A sum that is under way; `wait` for it before its tensor is read or written."""

    def __init__(self, group: Group, work: dist.Work | None) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Waits until the tensor holds the sum; on a GPU, until its stream does.

        Raises:
            CommError: if a peer died, the timeout passed or the world was left.
        """
        if self._work is None:
            return
        with _failures_named(self._group, "all_reduce"):
            if self._group.backend == "gloo":
                wait(self._work, self._group.checked())
            else:
                self._work.wait()


def start_all_reduce(group: Group, tensor: Tensor) -> Reduction:
    """Starts to sum a tensor over all ranks, in place, and returns at once.

    Sums of one group end in the order in which they are started; all ranks start the same ones in
    the same order.

    Args:
        group: group whose ranks take part.
        tensor: same shape and type on every rank.

    Raises:
        CommError: if a peer is known to be dead.
    """
    process_group = group.checked()
    if group.world_size == 1:
        return Reduction(group, None)
    with _failures_named(group, "all_reduce"):
        work = dist.all_reduce(tensor, group=process_group, async_op=True)
    size = group.world_size
    _record_ring(group, "all_reduce", 2 * (size - 1) * _num_bytes(tensor) // size)
    return Reduction(group, work)


def bucket_sum(
    group: Group, on_ready: Callable[[], None] = lambda: None
) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook of DistributedDataParallel that sums gradients over ranks, in float32.

    Args:
        group: DistributedDataParallel's ranks.
        on_ready: called whenever a bucket of this rank's own gradients is complete.

    Returns:
        What `register_comm_hook` takes, with any state. Sums are not divided by the ranks.
    """
    process_group, size = group.checked(), group.world_size

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        on_ready()
        own = bucket.buffer()
        wide = own if own.dtype in (torch.float32, torch.float64) else own.float()
        work = dist.all_reduce(wide, group=process_group, async_op=True)
        assert work is not None, "it runs asynchronously"
        _record_ring(group, "all_reduce", 2 * (size - 1) * _num_bytes(wide) // size)
        return work.get_future().then(lambda _: own if wide is own else own.copy_(wide))

    # It refuses annotations that are not yet evaluated.
    hook.__annotations__.clear()
    return hook


def all_gather(group: Group, tensor: Tensor) -> list[Tensor]:
    """Collect every rank's tensor on every rank.

    Args:
        group: group whose ranks take part.
        tensor: same shape and type on every rank.

    Returns:
        One tensor a rank, by rank in the group.

    Raises:
        CommError: if a peer died or the timeout passed.
    """
    process_group = group.checked()
    gathered = [torch.empty_like(tensor) for _ in group.ranks]
    with _failures_named(group, "all_gather"):
        dist.all_gather(gathered, tensor.contiguous(), process_group)
    _record_ring(group, "all_gather", (group.world_size - 1) * _num_bytes(tensor))
    return gathered


def all_gather_into(group: Group, gathers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Collect every rank's tensors in place, without intermediate buffers.

    Args:
        group: group whose ranks take part.
        gathers: pairs (out, tensor) of contiguous tensors, of the same shapes and types on every
            rank: `out`, to fill, is cut into one equal part per rank, and rank k's `tensor` is
            received into part k.

    Raises:
        ConfigError: if the size or type of a pair does not match.
        CommError: if a peer died or the timeout passed.
    """
    process_group = group.checked()
    rank, size = group.rank, group.world_size
    for out, tensor in gathers:
        if out.numel() != size * tensor.numel() or out.dtype != tensor.dtype:
            raise ConfigError(
                f"all_gather_into: {size} parts {list(tensor.shape)} of {tensor.dtype} do not make "
                f"{list(out.shape)} of {out.dtype}"
            )
    if group.backend == "nccl":
        for out, tensor in gathers:
            with _failures_named(group, "all_gather"):
                dist.all_gather_into_tensor(out.view(-1), tensor.view(-1), process_group)
            _record_ring(group, "all_gather", (size - 1) * _num_bytes(tensor))
        return
    # gloo's all-gather allocates a buffer for all parts and copies from it; the same ring as rounds
    # needs neither.
    rounds = []
    for out, tensor in gathers:
        parts = out.view(size, *tensor.shape)
        parts[rank].copy_(tensor)
        rounds += [
            Round(
                send_to=(rank - 1) % size,
                send=parts[(rank + step) % size],
                recv_from=(rank + 1) % size,
                recv=parts[(rank + step + 1) % size],
            )
            for step in range(size - 1)
        ]
    run_rounds(group, rounds, None, "all_gather")


def all_gather_v(group: Group, tensor: Tensor) -> list[Tensor]:
    """Collect every rank's tensor on every rank, where the first dimensions may differ.

    Args:
        group: group whose ranks take part.
        tensor: at least one dimension; type and further dimensions equal on every rank.

    Returns:
        One tensor a rank, by rank in the group; this rank's own is the tensor given.

    Raises:
        ConfigError: if the tensor has no dimension.
        CommError: if a peer died or the timeout passed.
    """
    if tensor.dim() == 0:
        raise ConfigError("all_gather_v needs a tensor with a first dimension, got a scalar")
    tensor = tensor.contiguous()
    counts = all_gather(group, torch.tensor([len(tensor)], device=tensor.device))
    gathered = [tensor.new_empty((int(count), *tensor.shape[1:])) for count in counts]
    gathered[group.rank] = tensor
    rounds = ring_rounds(group, [tensor] * group.world_size, gathered)
    run_rounds(group, rounds, None, "all_gather_v", at_once=True)
    return gathered


def broadcast(group: Group, tensor: Tensor, src: int) -> Tensor:
    """Copy one rank's tensor to all, in place.

    Args:
        group: group whose ranks take part.
        tensor: same shape and type on every rank.
        src: rank in the group whose values are copied.

    Returns:
        The tensor given.

    Raises:
        ConfigError: if `src` is not in the group.
        CommError: if a peer died or the timeout passed.
    """
    process_group = group.checked()
    _check_root(group, src, "src")
    with _failures_named(group, "broadcast"):
        dist.broadcast(tensor, group.ranks[src], process_group)
    num_bytes = _num_bytes(tensor)
    for sender, receiver in _binomial_tree(group.world_size):
        sender, receiver = ((rank + src) % group.world_size for rank in (sender, receiver))
        if sender == group.rank:
            group.ledger.record("broadcast", group.ranks[receiver], num_bytes)
        if receiver == group.rank:
            peer = group.ranks[sender]
            group.ledger.record("broadcast", peer, num_bytes, direction="received")
    return tensor


def gather_v(group: Group, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
    """Collect tensors of different lengths on one rank.

    Args:
        group: group whose ranks take part.
        tensor: one-dimensional; length and type may differ by rank.
        root: rank in the group that receives them.

    Returns:
        On the root one tensor a rank, by rank in the group; None elsewhere.

    Raises:
        ConfigError: if the tensor is not one-dimensional or the root not in the group.
        CommError: if a peer died or the timeout passed.
    """
    _check_root(group, root, "root")
    tensor = tensor.contiguous()
    headers = all_gather(group, _header(tensor))
    if group.rank != root:
        run_rounds(group, [_send_only(root, tensor)], None, "gather_v")
        return None
    gathered = [tensor if rank == root else _empty(headers[rank]) for rank in _ranks(group)]
    rounds = [_recv_only(rank, gathered[rank]) for rank in _ranks(group) if rank != root]
    run_rounds(group, rounds, None, "gather_v", at_once=True)
    return gathered


def scatter_v(group: Group, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
    """Send each rank its own tensor from one rank; lengths and types may differ.

    Args:
        group: group whose ranks take part.
        tensors: on the root one one-dimensional tensor per rank; None elsewhere.
        root: rank in the group that sends them.

    Returns:
        This rank's tensor.

    Raises:
        ConfigError: if the root does not give one tensor per rank or is not in the group.
        CommError: if a peer died or the timeout passed.
    """
    _check_root(group, root, "root")
    if group.rank != root:
        header = torch.empty(2, dtype=torch.int64, device=group.device)
        run_rounds(group, [_recv_only(root, header)], None, "scatter_v")
        tensor = _empty(header)
        run_rounds(group, [_recv_only(root, tensor)], None, "scatter_v")
        return tensor
    if tensors is None or len(tensors) != group.world_size:
        found = "None" if tensors is None else f"{len(tensors)} tensors"
        raise ConfigError(
            f"scatter_v on the root, rank {root}, needs one tensor for each of "
            f"{group.world_size} ranks, got {found}"
        )
    peers = [rank for rank in _ranks(group) if rank != root]
    headers = [_send_only(rank, _header(tensors[rank])) for rank in peers]
    run_rounds(group, headers, None, "scatter_v", at_once=True)
    rounds = [_send_only(rank, tensors[rank].contiguous()) for rank in peers]
    run_rounds(group, rounds, None, "scatter_v", at_once=True)
    return tensors[root]


def all_to_all_v(
    group: Group, sends: Sequence[Tensor], recvs: Sequence[Tensor], phase: str | None = None
) -> None:
    """Exchange one tensor between every pair of ranks.

    All messages start at once, so that an exchange takes one latency and not one a peer. A rank's
    tensor for itself is copied. Empty tensors are not sent.

    Args:
        group: group whose ranks take part.
        sends: one contiguous tensor per rank, by rank in the group.
        recvs: one contiguous tensor per rank, of the sizes that the peers send; written to.
        phase: name of the program's phase; the ledger's open phase when None.

    Raises:
        ConfigError: if there is not one tensor per rank, or a tensor cannot be sent.
        CommError: if a peer died or the timeout passed; names rank, peer and round.
    """
    for name, tensors in (("sends", sends), ("recvs", recvs)):
        if len(tensors) != group.world_size:
            raise ConfigError(
                f"all_to_all_v needs one tensor for each of {group.world_size} ranks in {name}, "
                f"got {len(tensors)}"
            )
    run_rounds(group, ring_rounds(group, sends, recvs), phase, "all_to_all_v", at_once=True)
    recvs[group.rank].copy_(sends[group.rank])


def barrier(group: Group) -> None:
    """Wait until every rank has called this.

    Raises:
        CommError: if a peer died or the timeout passed.
    """
    process_group = group.checked()
    with _failures_named(group, "barrier"):
        dist.barrier(process_group)


@contextmanager
def _failures_named(group: Group, op: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        phase = group.ledger.current_phase
        raise CommError(
            f"rank {group.ranks[group.rank]}: {op} among ranks {list(group.ranks)} failed in "
            f"phase {phase!r}: {error}. A peer died, hangs or called another operation; look at "
            f"the other ranks' output (timeout {group.timeout.total_seconds():g} s)"
        ) from error


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _ranks(group: Group) -> range:
    return range(group.world_size)


def _record_ring(group: Group, op: str, num_bytes: int) -> None:
    if group.world_size == 1:
        return
    # gloo's rings send segments to rank - 1 and receive them from rank + 1.
    before = group.ranks[(group.rank - 1) % group.world_size]
    after = group.ranks[(group.rank + 1) % group.world_size]
    group.ledger.record(op, before, num_bytes)
    group.ledger.record(op, after, num_bytes, direction="received")


def _binomial_tree(size: int) -> Iterator[tuple[int, int]]:
    reach = 1
    while reach < size:
        yield from ((rank, rank + reach) for rank in range(min(reach, size - reach)))
        reach *= 2


def _send_only(peer: int, tensor: Tensor) -> Round:
    return Round(send_to=peer, send=tensor, recv_from=peer, recv=None)


def _recv_only(peer: int, tensor: Tensor) -> Round:
    return Round(send_to=peer, send=None, recv_from=peer, recv=tensor)


def _header(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or tensor.dtype not in _DTYPES:
        raise ConfigError(
            f"expected a one-dimensional tensor of a real type, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}; flatten it, or view complex numbers as real"
        )
    return torch.tensor([len(tensor), _DTYPES.index(tensor.dtype)], device=tensor.device)


def _empty(header: Tensor) -> Tensor:
    count, code = (int(value) for value in header)
    return torch.empty(count, dtype=_DTYPES[code], device=header.device)


def _check_root(group: Group, root: int, name: str) -> None:
    if not 0 <= root < group.world_size:
        raise ConfigError(f"{name} must be a rank of 0..{group.world_size - 1}, got {root}")
