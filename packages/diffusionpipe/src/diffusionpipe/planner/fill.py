"""Where frozen components run: the second half of DiffusionPipe (arXiv 2405.01248), section 5.

Filling by ownership, in place of the paper's form: a sample stays on one device for a whole
component, so that only its outputs travel. Components are placed one after another, that of the
longest sample first: each device takes samples in proportion to what fits into its idle time, and
what fits nowhere goes to the end of the devices that finish first. O(components x devices x
entries).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from diffusionpipe.planner.slots import DeviceSlots

__all__ = ["FrozenCost", "Insertion", "encode_first", "fill_idle", "split_evenly"]


class FrozenCost(NamedTuple):
    """What a frozen component costs.

    Attributes:
        name: of the component.
        seconds: by number of samples encoded at once, from 0 to `max_rows`; rising.
    """

    name: str
    seconds: Sequence[float]

    @property
    def max_rows(self) -> int:
        """Most samples that are encoded at once."""
        return len(self.seconds) - 1

    def time_s(self, num_samples: int) -> float:
        """Seconds of so many samples, in chunks of at most `max_rows`."""
        chunks, rest = divmod(num_samples, self.max_rows)
        return chunks * self.seconds[-1] + self.seconds[rest]

    def count_fitting(self, available_s: float, num_samples: int) -> int:
        """Counts the samples that fit into a time, at most `num_samples`."""
        available_s *= 1 + 1e-12  # what fits exactly fits
        chunks = int(available_s // self.seconds[-1]) if self.seconds[-1] > 0 else num_samples
        rest = available_s - chunks * self.seconds[-1]
        more = int(np.searchsorted(self.seconds, max(rest, 0.0), side="right")) - 1
        return min(chunks * self.max_rows + max(more, 0), num_samples)


class Insertion(NamedTuple):
    """Samples of a component that a device encodes before an entry of its list.

    Attributes:
        device: index of the device.
        position: index of the entry; the list's length for the end.
        name: component.
        count: number of samples.
    """

    device: int
    position: int
    name: str
    count: int


def fill_idle(
    slots: Sequence[DeviceSlots],
    components: Sequence[FrozenCost],
    num_samples: int,
    quotas: Mapping[str, Sequence[int]] | None = None,
) -> list[Insertion]:
    """Places all samples of all components, in idle time as far as they fit.

    Args:
        slots: idle time of each device; what is placed is inserted there too.
        components: frozen components.
        num_samples: samples of each component.
        quotas: samples of each component that each device must encode; free by default.

    Returns:
        What each device encodes where, in the order of its list for each component.
    """
    insertions: list[Insertion] = []
    for component in sorted(components, key=lambda each: -each.time_s(1)):
        fixed = quotas[component.name] if quotas else None
        room = [_insert_samples(_copy(each), component, num_samples)[1] for each in slots]
        wanted = fixed or _share(num_samples, room)
        left = num_samples
        lists: list[list[Insertion]] = []
        for device, (each, quota) in enumerate(zip(slots, wanted, strict=True)):
            placed, count = _insert_samples(each, component, quota)
            lists.append([Insertion(device, at, component.name, n) for at, n in placed])
            left -= count
        tails = (
            [
                quota - sum(each.count for each in own)
                for quota, own in zip(fixed, lists, strict=True)
            ]
            if fixed
            else _share_tails([each.finish_s for each in slots], component, left)
        )
        for device, count in enumerate(tails):
            if count:
                end = len(slots[device].start_s)
                slots[device].inserted_s[-1] += component.time_s(count)
                lists[device].append(Insertion(device, end, component.name, count))
        end_s = max(each.finish_s for each in slots)
        for each in slots:
            each.end_s = max(each.end_s, end_s)
        insertions += [each for own in lists for each in own]
    return insertions


def encode_first(
    num_devices: int, components: Sequence[FrozenCost], num_samples: int
) -> list[Insertion]:
    """Has each device encode an even share of all samples before its first pass."""
    shares = split_evenly(num_samples, num_devices)
    return [
        Insertion(device, 0, component.name, count)
        for component in components
        for device, count in enumerate(shares)
        if count
    ]


def split_evenly(count: int, parts: int) -> list[int]:
    """Splits a number into parts that differ by one at most, the larger ones first."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _copy(slots: DeviceSlots) -> DeviceSlots:
    return DeviceSlots(
        slots.start_s, slots.duration_s, slots.latest_s, slots.end_s, list(slots.inserted_s)
    )


def _insert_samples(
    slots: DeviceSlots, component: FrozenCost, quota: int
) -> tuple[list[tuple[int, int]], int]:
    """Inserts up to so many samples into idle time; returns (position, samples) and their sum."""
    placed: list[tuple[int, int]] = []
    total = 0

    def insert(position: int, available_s: float) -> float:
        nonlocal total
        count = component.count_fitting(available_s, quota - total)
        if not count:
            return 0.0
        total += count
        placed.append((position, count))
        return component.time_s(count)

    slots.walk(insert)
    return placed, total


def _share(num_samples: int, room: Sequence[int]) -> list[int]:
    """Samples in proportion to room, by largest remainders; all the room where it is too little."""
    total = sum(room)
    if total <= num_samples:
        return list(room)
    shares = [num_samples * each // total for each in room]
    remainders = [num_samples * each % total for each in room]
    order = sorted(range(len(room)), key=lambda device: -remainders[device])
    for device in order[: num_samples - sum(shares)]:
        shares[device] += 1
    return shares


def _share_tails(finish_s: Sequence[float], component: FrozenCost, num_samples: int) -> list[int]:
    """Samples behind each device's last entry, one after another to that which then ends first."""
    counts = [0] * len(finish_s)
    time_s: Callable[[int], float] = component.time_s
    heap = [(finish + time_s(1), device) for device, finish in enumerate(finish_s)]
    heapify(heap)
    for _ in range(num_samples):
        device = heap[0][1]
        counts[device] += 1
        heapreplace(heap, (finish_s[device] + time_s(counts[device] + 1), device))
    return counts
