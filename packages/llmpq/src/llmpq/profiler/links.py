"""Seconds of messages between ranks, measured the way a pipeline sends them."""

from __future__ import annotations

import time
from itertools import combinations
from statistics import median

import torch

from shared.comms import Group, Round, all_gather, barrier, post_rounds
from shared.topology.link import Link, fit_link

__all__ = ["measure_links"]

_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_TURNS = 3


def measure_links(group: Group, *, limit_s: float = 2.0) -> dict[tuple[int, int], Link]:
    """Measures the link of each pair of ranks by echoes, one pair after the other; all ranks call it.

    A message's seconds are half of its echo's, so both directions count as equal.

    Args:
        group: the ranks.
        limit_s: seconds for each pair; large messages are left out on slow links.

    Returns:
        A link for each pair (lower rank, higher rank), the same on every rank.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    size, me = group.world_size, group.rank
    mine = torch.zeros(size, 2, dtype=torch.float64)
    for low, high in combinations(range(size), 2):
        if me == low:
            fit = fit_link(_lead_echoes(group, high, limit_s)).link
            mine[high] = torch.tensor([fit.alpha_s, fit.beta_s_per_byte])
        elif me == high:
            _answer_echoes(group, low)
        barrier(group)
    table = all_gather(group, mine)
    return {
        (low, high): Link(
            alpha_s=float(table[low][high, 0]), beta_s_per_byte=float(table[low][high, 1])
        )
        for low, high in combinations(range(size), 2)
    }


def _lead_echoes(group: Group, peer: int, limit_s: float) -> list[tuple[int, float]]:
    """Sends messages of growing sizes and takes them back; then tells the peer that it is over."""
    begin, found, spent_s = time.perf_counter(), [], 0.0
    for previous, size in zip((_SIZES[0], *_SIZES), _SIZES, strict=False):
        now = time.perf_counter() - begin
        if len(found) >= 2 and now + spent_s * size / previous > limit_s:
            break
        body, seconds = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(_TURNS + 1):
            started = time.perf_counter()
            _exchange(group, peer, send=torch.tensor([size]))
            _exchange(group, peer, send=body)
            _exchange(group, peer, receive=body)
            seconds.append(time.perf_counter() - started)
        found.append((size, median(seconds[1:]) / 2))
        spent_s = sum(seconds)
    _exchange(group, peer, send=torch.tensor([0]))
    return found


def _answer_echoes(group: Group, peer: int) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        _exchange(group, peer, receive=size)
        if not int(size):
            return
        body = torch.empty(int(size), dtype=torch.uint8)
        _exchange(group, peer, receive=body)
        _exchange(group, peer, send=body)


def _exchange(
    group: Group,
    peer: int,
    send: torch.Tensor | None = None,
    receive: torch.Tensor | None = None,
) -> None:
    item = Round(send_to=peer, send=send, recv_from=peer, recv=receive)
    post_rounds(group, [item], "links").wait_all()
