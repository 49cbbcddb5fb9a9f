"""An all-to-all of uneven rows that runs while its caller computes: start it, then wait for it.

How many rows each pair of ranks exchanges may depend on the data, as with the tokens of a
Mixture-of-Experts layer. On CPUs the rows travel by rounds (`shared.comms.post_rounds`): gloo's own
all-to-all sends to all peers at once, and a link then carries between half and all of its rate. On
GPUs it is NCCL's all-to-all, on NCCL's stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shared.comms.exchange.pending import CollectiveExchange, PendingExchange, RoundsExchange
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["PendingExchange", "start_exchange"]


def start_exchange(
    group: Group,
    rows: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    *,
    phase: str,
    lane: str = "rounds",
) -> PendingExchange:
    """Starts to exchange rows between every pair of ranks, and returns at once.

    Every rank of the group starts the same exchanges of a lane in the same order. A pair of ranks
    without rows for each other sends nothing; a rank's rows for itself are copied. Not
    differentiable.

    Args:
        group: group whose ranks take part.
        rows: this rank's rows [sum(send_sizes), ...], those for rank 0 first; not to be written to
            before `wait` has returned.
        send_sizes: number of rows for each rank of the group.
        recv_sizes: number of rows from each rank of the group, as its `send_sizes` say.
        phase: name of the exchange, for the ledger and for errors.
        lane: as for `post_rounds`; NCCL has one.

    Returns:
        A handle; its `wait` returns the rows received.

    Raises:
        ConfigError: the sizes are negative, are not one for each rank or do not fit the rows, or
            the rows are not contiguous; nothing is sent.
    """
    group.checked()
    _check(group, rows, send_sizes, recv_sizes, phase)
    rows, sends, recvs = rows.detach(), [*map(int, send_sizes)], [*map(int, recv_sizes)]
    if group.backend == "nccl":
        return CollectiveExchange(group, rows, sends, recvs, phase)
    return RoundsExchange(group, rows, sends, recvs, phase, lane)


def _check(
    group: Group, rows: Tensor, sends: Sequence[int], recvs: Sequence[int], phase: str
) -> None:
    caller = f"rank {group.ranks[group.rank]}, phase {phase!r}"
    for name, sizes in (("send_sizes", sends), ("recv_sizes", recvs)):
        if len(sizes) != group.world_size or min(sizes) < 0:
            raise ConfigError(
                f"{caller}: expected {name} to be {group.world_size} numbers of rows of 0 or more, "
                f"one for each rank, got {list(sizes)}"
            )
    if rows.dim() == 0 or sum(sends) != len(rows):
        raise ConfigError(
            f"{caller}: expected as many rows as send_sizes {list(sends)} add up to, "
            f"{sum(sends)}, got a tensor of shape {list(rows.shape)}"
        )
    if sends[group.rank] != recvs[group.rank]:
        raise ConfigError(
            f"{caller}: expected one number of rows that this rank keeps, got "
            f"{sends[group.rank]} in send_sizes and {recvs[group.rank]} in recv_sizes"
        )
    if not rows.is_contiguous():
        raise ConfigError(
            f"{caller}: expected contiguous rows, got shape {list(rows.shape)} with strides "
            f"{rows.stride()}; call .contiguous()"
        )
