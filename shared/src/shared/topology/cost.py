"""Closed-form times of collectives on links that take alpha + beta * bytes.

Every formula assumes equal full-duplex links and no compute time. `num_bytes` is always the size of
one rank's tensor before the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import TopologyError
from shared.topology.link import Link, Number

__all__ = [
    "all_gather_s",
    "all_to_all_s",
    "point_to_point_s",
    "reduce_scatter_s",
    "ring_all_reduce_s",
    "tree_broadcast_s",
]


def point_to_point_s(link: Link, num_bytes: Number) -> float:
    """Seconds of one message; 0 for an empty one, which is not sent.

    Raises:
        TopologyError: if the bytes are negative.
    """
    _check(1, num_bytes)
    return link.time_s(num_bytes) if num_bytes else 0.0


def ring_all_reduce_s(link: Link, num_bytes: Number, ranks: int) -> float:
    """Seconds of a reduce-scatter and an all-gather around a ring: 2(n-1) steps of 1/n each.

    Raises:
        TopologyError: if there is no rank or the bytes are negative.
    """
    _check(ranks, num_bytes)
    return 2 * (ranks - 1) * link.time_s(float(num_bytes) / ranks)


def reduce_scatter_s(link: Link, num_bytes: Number, ranks: int) -> float:
    """Seconds until each of n ranks has 1/n of the sum of their tensors, around a ring.

    Raises:
        TopologyError: if there is no rank or the bytes are negative.
    """
    _check(ranks, num_bytes)
    return (ranks - 1) * link.time_s(float(num_bytes) / ranks)


def all_gather_s(link: Link, num_bytes: Number, ranks: int) -> float:
    """Seconds until each of n ranks has the tensors of all, around a ring.

    Raises:
        TopologyError: if there is no rank or the bytes are negative.
    """
    _check(ranks, num_bytes)
    return (ranks - 1) * link.time_s(num_bytes)


def tree_broadcast_s(link: Link, num_bytes: Number, ranks: int) -> float:
    """Seconds of a binomial tree, in which the number of ranks that have the tensor doubles.

    Raises:
        TopologyError: if there is no rank or the bytes are negative.
    """
    _check(ranks, num_bytes)
    return (ranks - 1).bit_length() * link.time_s(num_bytes)


def all_to_all_s(rounds: Sequence[Sequence[tuple[Link, Number]]]) -> float:
    """Seconds of rounds that run one after another, each taking the time of its slowest message.

    Args:
        rounds: for each round its concurrent messages, as (link, bytes).

    Raises:
        TopologyError: if bytes are negative.
    """
    return sum(
        max((point_to_point_s(link, num_bytes) for link, num_bytes in messages), default=0.0)
        for messages in rounds
    )


def _check(ranks: int, num_bytes: Number) -> None:
    if ranks < 1 or not num_bytes >= 0:
        raise TopologyError(
            f"a collective needs at least one rank and no negative bytes, got {ranks} ranks and "
            f"{num_bytes} bytes"
        )
