"""Decides whether shared reads are faster, from rates of storage and network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from bytecheckpoint.loading.reader import Unit
from bytecheckpoint.loading.source import Source
from bytecheckpoint.ranks.team import Team
from shared.comms import Round, post_rounds
from shared.errors import ConfigError

__all__ = ["Rates", "measure", "pays"]

# Bytes: few compared with a load, but enough that a request's latency does not dominate.
_PROBE_BYTES = 1024 * 1024
# Cost of packing, sending and placing one box on a rank, beside the cost of its bytes.
_BOX_S = 40e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Transfer rates of all ranks together.

    Attributes:
        storage_bytes_per_s: bytes per second read from the storage.
        network_bytes_per_s: bytes per second sent between ranks.

    Raises:
        ConfigError: a rate is not above 0.
    """

    storage_bytes_per_s: float
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.storage_bytes_per_s > 0 and self.network_bytes_per_s > 0):
            raise ConfigError(f"expected rates above 0 bytes/s, got {self}")


def pays(
    rates: Rates, *, alone_bytes: int, once_bytes: int, num_boxes: int, num_ranks: int
) -> bool:
    """Whether reading data once and sending it takes less time than reading it on every rank.

    Args:
        rates: rates of storage and network; the same on all ranks, as everything here.
        alone_bytes: bytes that all ranks together read if each reads for itself.
        once_bytes: bytes that they read if each byte is read once; the rest is sent.
        num_boxes: number of boxes that all ranks together need.
        num_ranks: number of ranks that read.
    """
    alone_s = alone_bytes / rates.storage_bytes_per_s
    once_s = once_bytes / rates.storage_bytes_per_s
    sent_s = (alone_bytes - once_bytes) / rates.network_bytes_per_s
    return once_s + sent_s + _BOX_S * num_boxes / num_ranks < alone_s


def measure(team: Team, source: Source, units: Sequence[Unit]) -> Rates:
    """Times one read and one message of every rank, all at the same time; called by all together.

    Args:
        team: at least two ranks.
        source: the checkpoint to read from.
        units: the reads of this rank without sharing; the largest is timed.
    """
    group = team.group
    assert group is not None, "shared reads need two or more ranks"
    largest = max(units, key=lambda unit: unit.stop - unit.start, default=None)
    num_bytes = min(_PROBE_BYTES, largest.stop - largest.start) if largest else 0
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    begin = time.perf_counter()
    with suppress(OSError):  # the load itself will meet and report it
        if largest is not None:
            path = source.path(largest.file)
            source.storage.read_into(path, largest.start, buffer.numpy().data)
    storage_s = time.perf_counter() - begin
    sent, received = torch.empty(2, _PROBE_BYTES, dtype=torch.uint8)
    team.maximum([0])  # so that no message waits for another rank's read
    begin = time.perf_counter()
    ring = Round(
        send_to=(team.rank + 1) % team.world_size,
        send=sent,
        recv_from=(team.rank - 1) % team.world_size,
        recv=received,
    )
    post_rounds(group, [ring], op="probe").wait_all()
    network_s = time.perf_counter() - begin
    # A rank that reads nothing measures no storage rate.
    per_byte_s = storage_s / num_bytes if num_bytes else 0.0
    slowest = team.maximum([int(per_byte_s * 1e15), int(network_s * 1e9)])
    return Rates(
        storage_bytes_per_s=team.world_size * 1e15 / max(slowest[0], 1),
        network_bytes_per_s=team.world_size * _PROBE_BYTES * 1e9 / max(slowest[1], 1),
    )
