"""Measures what messages under way cost the computation beside them.

Threads that send and receive take their share of a rank's cores. Between ranks of a core each that is
some percent of a step, which neither a layer's seconds nor a link's show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from shared.comms import Group, Round, barrier, post_rounds
from shared.comms.courier import connect

__all__ = ["time_messages"]

# Bytes and number of messages: many small ones, and few large ones.
_SMALL, _LARGE = (1_000, 20), (1_000_000, 2)
_RUNS = 5
# Messages that do not arrive meanwhile have failed, and say so when they are waited for.
_LONGEST_S = 60.0


def time_messages(compute: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Measures how much longer computing takes while messages come and go.

    The first and the last rank exchange some; every rank calls it. Over NCCL nothing is measured:
    there the GPU's copies run beside its kernels.

    Args:
        compute: computes for some milliseconds on this process' cores.
        repeats: measurements of each size, of which the median counts.

    Returns:
        Seconds a message and seconds a byte, for one sent and one received at the same time. Zeros on
        all other ranks, and in one process.

    Raises:
        CommError: a rank died.
    """
    if not Group.exists():
        return 0.0, 0.0
    world = Group.world()
    if world.world_size == 1 or world.backend == "nccl":
        return 0.0, 0.0
    pair = Group.of([0, world.world_size - 1])
    if pair.rank < 0:
        return 0.0, 0.0
    connect(pair)
    large_s, small_s = (
        median(_lose_s(compute, pair, *messages) for _ in range(repeats))
        for messages in (_LARGE, _SMALL)
    )
    message_s = max(small_s, 0.0) / _SMALL[1]
    byte_s = max(large_s / _LARGE[1] - message_s, 0.0) / _LARGE[0]
    return message_s, byte_s


def _lose_s(compute: Callable[[], object], pair: Group, num_bytes: int, count: int) -> float:
    """Seconds that computing loses while so many messages are under way in both directions."""
    barrier(pair)
    began = time.perf_counter()
    for _ in range(_RUNS):
        compute()
    alone_s = (time.perf_counter() - began) / _RUNS
    peer = 1 - pair.rank
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    rounds = [
        Round(send_to=peer, send=sent, recv_from=peer, recv=torch.empty_like(sent))
        for _ in range(count)
    ]
    barrier(pair)
    began, num_runs = time.perf_counter(), 0
    pending = post_rounds(pair, rounds, "profile of messages")
    while math.isnan(pending.round_s[-1]) and time.perf_counter() - began < _LONGEST_S:
        compute()
        num_runs += 1
    lost_s = time.perf_counter() - began - num_runs * alone_s
    pending.wait_all()
    return lost_s
