"""Where frozen components run: the second half of DiffusionPipe (arXiv 2405.01248), section 5.

Filling by ownership, in place of the paper's form: a sample stays on one device for a whole
component, so that only its outputs travel. Components are placed one after another, that of the
longest sample first: each device takes samples in proportion to what fits into its idle time, and
the rest goes to the end of the devices that finish first.

A replay says when each pass of a static list starts. A pass may start later than that as long as no
other device waits for it: we compute these latest starts once, and then insert work before the
passes that wait, each device by itself. O(components x devices x entries).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shared.topology import Timeline

__all__ = [
    "DeviceSlots",
    "FrozenCost",
    "Insertion",
    "encode_first",
    "fill_bubbles",
    "fill_idle",
    "find_slots",
    "split_evenly",
]

# Idle time below this share of the makespan is rounding.
_ROUNDING = 1e-9


class FrozenCost(NamedTuple):
    """Seconds of a frozen component.

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
        if available_s >= self.time_s(num_samples):
            return num_samples
        chunks = int(available_s // self.seconds[-1])
        rest = max(available_s - chunks * self.seconds[-1], 0.0)
        return chunks * self.max_rows + int(np.searchsorted(self.seconds, rest, "right")) - 1


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


@dataclass
class DeviceSlots:
    """The list of one device, with room for inserted work before each entry and behind the last.

    Attributes:
        names: of the entries' operations.
        start_s, duration_s: of each entry, as replayed without inserted work.
        latest_s: latest start of each entry that delays no other device.
        end_s: end of the step; work behind the last entry may reach to it, or move it.
        inserted_s: seconds of inserted work before each entry, and behind the last.
        shortest_wait_s: an entry that waits for less has no work inserted before it: the work might
            begin when the wait is over.
    """

    names: Sequence[Hashable]
    start_s: Sequence[float]
    duration_s: Sequence[float]
    latest_s: Sequence[float]
    end_s: float
    inserted_s: Sequence[float] = ()
    shortest_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.inserted_s = list(self.inserted_s) or [0.0] * (len(self.start_s) + 1)

    @property
    def finish_s(self) -> float:
        """Seconds until the last entry and the work inserted behind it end."""
        return self.walk(lambda position, available_s: 0.0)

    def walk(self, insert: Callable[[int, float], float]) -> float:
        """Offers each idle period in turn, and inserts the work that is returned.

        Args:
            insert: function of a position (before that entry; behind the last) and the seconds
                available there, which returns the seconds of work to insert, at most these.

        Returns:
            Seconds until all ends.
        """
        # The latest start of each entry that leaves room for all entries and insertions after it.
        limits, latest = [0.0] * len(self.start_s), self.end_s
        for position in reversed(range(len(self.start_s))):
            latest -= self.inserted_s[position + 1] + self.duration_s[position]
            latest = limits[position] = min(latest, self.latest_s[position])
        clock, inserted_s = 0.0, list(self.inserted_s)
        for position, start in enumerate(self.start_s):
            clock += inserted_s[position]
            if clock < start - max(self.shortest_wait_s, _ROUNDING * self.end_s):
                added = insert(position, limits[position] - clock)
                inserted_s[position] += added
                clock += added
            clock = max(clock, start) + self.duration_s[position]
        clock += inserted_s[-1]
        added = insert(len(self.start_s), max(self.end_s - clock, 0.0))
        inserted_s[-1] += added
        self.inserted_s = inserted_s
        return clock + added

    def place(self, component: FrozenCost, quota: int) -> list[tuple[int, int]]:
        """Inserts up to so many samples into idle time; returns their (position, number)."""
        placed: list[tuple[int, int]] = []
        left = quota

        def insert(position: int, available_s: float) -> float:
            nonlocal left
            count = component.count_fitting(max(available_s, 0.0), left)
            if count:
                placed.append((position, count))
                left -= count
            return component.time_s(count)

        self.walk(insert)
        return placed


def find_slots(
    timeline: Timeline, queues: Sequence[str], shortest_wait_s: float = 0.0
) -> list[DeviceSlots]:
    """Finds the idle time of devices.

    Args:
        timeline: of a step; its other queues are links.
        queues: the devices' names.
        shortest_wait_s: as of `DeviceSlots`.

    Returns:
        The slots of each device, in the order of `queues`.
    """
    graph = timeline.graph
    number = {graph.queues.index(queue): device for device, queue in enumerate(queues)}
    device_of = [number.get(own[0]) if len(own) == 1 else None for own in graph.held]
    duration = timeline.end_s - timeline.start_s
    latest = np.array(_find_latest_ends(timeline, device_of)) - duration
    entries: list[list[int]] = [[] for _ in queues]
    for i in timeline.order:
        if (device := device_of[i]) is not None:
            entries[device].append(i)
    return [
        DeviceSlots(
            [graph.operations[i].name for i in own],
            *(table[own].tolist() for table in (timeline.start_s, duration, latest)),
            end_s=timeline.makespan_s,
            shortest_wait_s=shortest_wait_s,
        )
        for own in entries
    ]


def fill_idle(
    slots: Sequence[DeviceSlots],
    components: Sequence[FrozenCost],
    num_samples: int,
    quotas: Mapping[str, Sequence[int]] | None = None,
    holders: Mapping[str, Sequence[bool]] | None = None,
) -> list[Insertion]:
    """Places all samples of all components, in idle time as far as they fit.

    Args:
        slots: idle time of each device; the work is inserted there too.
        components: frozen components.
        num_samples: samples of each component.
        quotas: samples of each component that each device must encode; free by default.
        holders: by component, the devices that may encode it; all by default, and where none may.

    Returns:
        Samples by device and position, in the order of its list for each component.
    """
    insertions: list[Insertion] = []
    for component in sorted(components, key=lambda each: -each.time_s(1)):
        is_holder = _list_holders(component, holders, len(slots))
        room = [
            sum(count for _, count in replace(each).place(component, num_samples)) if is_own else 0
            for is_own, each in zip(is_holder, slots, strict=True)
        ]
        wanted = quotas[component.name] if quotas else _share(num_samples, room)
        placed = [each.place(component, quota) for each, quota in zip(slots, wanted, strict=True)]
        counts = [sum(count for _, count in own) for own in placed]
        finish_s = [
            each.finish_s if is_own else np.inf
            for is_own, each in zip(is_holder, slots, strict=True)
        ]
        tails = (
            [quota - count for quota, count in zip(wanted, counts, strict=True)]
            if quotas
            else _share_tails(finish_s, component, num_samples - sum(counts))
        )
        for device, (each, own, count) in enumerate(zip(slots, placed, tails, strict=True)):
            each.inserted_s = [*each.inserted_s[:-1], each.inserted_s[-1] + component.time_s(count)]
            own += [(len(each.start_s), count)] * (count > 0)
            insertions += [
                Insertion(device, position, component.name, number) for position, number in own
            ]
        end_s = max(each.finish_s for each in slots)
        for each in slots:
            each.end_s = max(each.end_s, end_s)
    return insertions


def fill_bubbles(
    timeline: Timeline, slots: Sequence[DeviceSlots], component: FrozenCost, num_samples: int
) -> list[Insertion]:
    """Fills as published: a new bubble begins whenever the set of idle devices changes.

    A bubble's samples are split over its devices evenly; the rest runs behind the step on all.

    Args:
        timeline: of the step; its devices' queues are "device 0", ...
        slots: idle time of each device.
        component: frozen component.
        num_samples: samples to encode.
    """
    gaps = [timeline.gaps_s(f"device {device}").tolist() for device in range(len(slots))]
    insertions, left = [], num_samples
    points = sorted({point for own in gaps for gap in own for point in gap})
    for start, end in itertools.pairwise(points):
        idle = [d for d, own in enumerate(gaps) if any(a <= start and end <= b for a, b in own)]
        fitting = component.count_fitting((end - start) * (1 + _ROUNDING), left)
        number = min(fitting * len(idle), left)
        left -= number
        for device, count in zip(idle, split_evenly(number, max(len(idle), 1)), strict=False):
            position = sum(each <= start for each in slots[device].start_s)
            insertions.append(Insertion(device, position, component.name, count))
    for device, count in enumerate(split_evenly(left, len(slots))):
        end = len(slots[device].start_s)
        insertions.append(Insertion(device, end, component.name, count))
    return [each for each in insertions if each.count]


def encode_first(
    num_devices: int,
    components: Sequence[FrozenCost],
    num_samples: int,
    holders: Mapping[str, Sequence[bool]] | None = None,
) -> list[Insertion]:
    """Has each device encode an even share of all samples before its first pass.

    Args:
        num_devices: devices of a pipeline.
        components: frozen components.
        num_samples: samples of each component.
        holders: by component, the devices that may encode it; all by default, and where none may.
    """
    insertions: list[Insertion] = []
    for component in components:
        is_holder = _list_holders(component, holders, num_devices)
        devices = [device for device in range(num_devices) if is_holder[device]]
        insertions += [
            Insertion(device, 0, component.name, count)
            for device, count in zip(devices, split_evenly(num_samples, len(devices)), strict=True)
            if count
        ]
    return insertions


def split_evenly(count: int, parts: int) -> list[int]:
    """Splits a number into parts that differ by one at most, the larger ones first."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _list_holders(
    component: FrozenCost, holders: Mapping[str, Sequence[bool]] | None, num_devices: int
) -> Sequence[bool]:
    """For each device, whether it may encode the component; all may where none has room."""
    is_holder = (holders or {}).get(component.name, ())
    return is_holder if any(is_holder) else [True] * num_devices


def _share(num_samples: int, room: Sequence[int]) -> list[int]:
    """Samples in proportion to room, by largest remainders; all the room where it is too little."""
    total = sum(room)
    if total <= num_samples:
        return list(room)
    shares = [num_samples * each // total for each in room]
    order = sorted(range(len(room)), key=lambda device: -(num_samples * room[device] % total))
    for device in order[: num_samples - sum(shares)]:
        shares[device] += 1
    return shares


def _share_tails(finish_s: Sequence[float], component: FrozenCost, num_samples: int) -> list[int]:
    """Samples behind each device's last entry, so that the last device ends as early as possible.

    Devices that finish at infinity get none.
    """

    def count_until(end_s: float) -> list[int]:
        return [
            component.count_fitting(max(end_s - finish, 0.0), num_samples) if finish < np.inf else 0
            for finish in finish_s
        ]

    if not num_samples:
        return [0] * len(finish_s)
    low_s, high_s = 0.0, min(finish_s) + component.time_s(num_samples)
    while low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        is_enough = sum(count_until(middle_s)) >= num_samples
        low_s, high_s = (low_s, middle_s) if is_enough else (middle_s, high_s)
    counts, most = count_until(low_s), count_until(high_s)
    for device, count in enumerate(most):
        more = min(count - counts[device], num_samples - sum(counts))
        counts[device] += max(more, 0)
    return counts


def _find_latest_ends(timeline: Timeline, device_of: Sequence[int | None]) -> list[float]:
    """Latest end of each operation for which all passes on other devices start as they did."""
    graph, start = timeline.graph, timeline.start_s.tolist()
    duration = (timeline.end_s - timeline.start_s).tolist()
    latest = [timeline.makespan_s] * len(start)
    next_on_link: dict[int, int] = {}
    for i in reversed(timeline.order):
        for other in graph.followers[i]:
            device = device_of[other]
            if device is not None and device == device_of[i]:
                continue  # the device's own list sees to that
            begin = start[other] if device is not None else latest[other] - duration[other]
            latest[i] = min(latest[i], begin)
        if device_of[i] is None:
            for queue in graph.held[i]:
                if queue in next_on_link:
                    other = next_on_link[queue]
                    latest[i] = min(latest[i], latest[other] - duration[other])
                next_on_link[queue] = i
    return latest
