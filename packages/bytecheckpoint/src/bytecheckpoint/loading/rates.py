"""Whether reading for one another pays: how fast storage and network are, given or measured."""

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

# Small against what a load reads, large against a request's latency.
_PROBE_BYTES = 1024 * 1024
# What packing, sending and placing one box costs a rank beside its bytes.
_BOX_S = 40e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast bytes come, for all ranks together.

    Attributes:
        storage_bytes_per_s: from the storage.
        network_bytes_per_s: between ranks.
    """

    storage_bytes_per_s: float
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.storage_bytes_per_s > 0 and self.network_bytes_per_s > 0):
            raise ConfigError(f"rates must be above 0 bytes a second, got {self}")


def pays(
    rates: Rates, *, alone_bytes: int, once_bytes: int, num_boxes: int, num_ranks: int
) -> bool:
    """Whether reading once and sending takes less time than reading several times.

    Args:
        rates: rates of storage and network; the same on all ranks, as everything here.
        alone_bytes: that all ranks read if each reads for itself.
        once_bytes: that they read if each byte is read once; the rest is sent.
        num_boxes: that are wanted, by all ranks.
        num_ranks: that read.
    """
    alone_s = alone_bytes / rates.storage_bytes_per_s
    once_s = once_bytes / rates.storage_bytes_per_s
    sent_s = (alone_bytes - once_bytes) / rates.network_bytes_per_s
    return once_s + sent_s + _BOX_S * num_boxes / num_ranks < alone_s


def measure(team: Team, source: Source, units: Sequence[Unit]) -> Rates:
    """Times one read and one message of every rank, all at the same time; called by all together.

    Args:
        team: at least two ranks.
        source: read from.
        units: what this rank would read alone; the largest is tried.
    """
    group = team.group
    assert group is not None, "one rank alone has nobody to share with"
    largest = max(units, key=lambda unit: unit.stop - unit.start, default=None)
    num_bytes = min(_PROBE_BYTES, largest.stop - largest.start) if largest else 0
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    begin = time.perf_counter()
    with suppress(OSError):  # the load itself meets it again, and says so
        if largest is not None:
            path = source.path(largest.file)
            source.storage.read_into(path, largest.start, buffer.numpy().data)
    storage_s = time.perf_counter() - begin
    sent, received = torch.empty(2, _PROBE_BYTES, dtype=torch.uint8)
    team.maximum([0])  # so that nobody's message waits for another's read
    begin = time.perf_counter()
    ring = Round(
        send_to=(team.rank + 1) % team.world_size,
        send=sent,
        recv_from=(team.rank - 1) % team.world_size,
        recv=received,
    )
    post_rounds(group, [ring], op="probe").wait_all()
    network_s = time.perf_counter() - begin
    # A rank that reads nothing has nothing to say of the storage.
    per_byte_s = storage_s / num_bytes if num_bytes else 0.0
    slowest = team.maximum([int(per_byte_s * 1e15), int(network_s * 1e9)])
    return Rates(
        storage_bytes_per_s=team.world_size * 1e15 / max(slowest[0], 1),
        network_bytes_per_s=team.world_size * _PROBE_BYTES * 1e9 / max(slowest[1], 1),
    )
