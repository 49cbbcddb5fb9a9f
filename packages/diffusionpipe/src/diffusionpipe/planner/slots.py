"""Idle time on devices in which other work fits without delaying any other device.

A replay says when each pass of a static list starts. A pass may start later than that as long as no
other device waits for it: we compute these latest starts once, and then insert jobs before the
passes that wait, each device by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.topology import Timeline

__all__ = ["DeviceSlots", "find_slots", "share_evenly"]

# Idle time below this share of the makespan is rounding.
_ROUNDING = 1e-9


@dataclass
class DeviceSlots:
    """The list of one device, with room for inserted work before each entry and behind the last.

    Attributes:
        start_s, duration_s: of each entry, as replayed without inserted work.
        latest_s: latest start of each entry that delays no other device.
        end_s: end of the step; work behind the last entry may reach to it, or move it.
        inserted_s: seconds of inserted work before each entry, and behind the last.
    """

    start_s: list[float]
    duration_s: list[float]
    latest_s: list[float]
    end_s: float
    inserted_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inserted_s = self.inserted_s or [0.0] * (len(self.start_s) + 1)

    @property
    def finish_s(self) -> float:
        """Seconds until the last entry and what was inserted behind it end."""
        return self.walk(lambda position, available_s: 0.0)

    def walk(self, insert: Callable[[int, float], float]) -> float:
        """Offers each idle period in turn, and inserts what is returned.

        Args:
            insert: function of a position (before that entry; behind the last) and the seconds
                available there, which returns the seconds of work to insert, at most these.

        Returns:
            Seconds until all ends.
        """
        limits, clock = self._find_limits(), 0.0
        rounding = _ROUNDING * self.end_s
        for position, (start, duration) in enumerate(
            zip(self.start_s, self.duration_s, strict=True)
        ):
            clock += self.inserted_s[position]
            if clock < start - rounding:
                added = insert(position, limits[position] - clock)
                self.inserted_s[position] += added
                clock += added
            clock = max(clock, start) + duration
        clock += self.inserted_s[-1]
        added = insert(len(self.start_s), max(self.end_s - clock, 0.0))
        self.inserted_s[-1] += added
        return clock + added

    def _find_limits(self) -> list[float]:
        """The latest start of each entry that leaves room for all entries and insertions after it."""
        limits, latest = [0.0] * len(self.start_s), self.end_s
        for position in reversed(range(len(self.start_s))):
            latest -= self.inserted_s[position + 1] + self.duration_s[position]
            latest = limits[position] = min(latest, self.latest_s[position])
        return limits


def find_slots(timeline: Timeline, queues: Sequence[str]) -> list[DeviceSlots]:
    """Finds the idle time of devices.

    Args:
        timeline: of a step; its other queues are links.
        queues: the devices' names.

    Returns:
        The slots of each device, in the order of `queues`.
    """
    graph = timeline.graph
    number = {graph.queues.index(queue): device for device, queue in enumerate(queues)}
    device_of = [number.get(held[0]) if len(held) == 1 else None for held in graph.held]
    latest_end = _find_latest_ends(timeline, device_of)
    entries: list[list[int]] = [[] for _ in queues]
    for i in timeline.order:
        if (device := device_of[i]) is not None:
            entries[device].append(i)
    duration = timeline.end_s - timeline.start_s
    return [
        DeviceSlots(
            start_s=[float(timeline.start_s[i]) for i in own],
            duration_s=[float(duration[i]) for i in own],
            latest_s=[float(latest_end[i] - duration[i]) for i in own],
            end_s=timeline.makespan_s,
        )
        for own in entries
    ]


def share_evenly(finish_s: Sequence[float], work_s: float) -> list[float]:
    """Splits work over devices so that the last one ends as early as possible.

    Args:
        finish_s: seconds after which each device is free.
        work_s: seconds of work in all, divisible at will.

    Returns:
        Seconds of each device.
    """
    order = sorted(finish_s)
    level_s, left_s = order[0], work_s
    for number, (low, high) in enumerate(zip(order, [*order[1:], float("inf")], strict=True), 1):
        level_s = low + left_s / number
        if level_s <= high:
            break
        left_s -= (high - low) * number
    return [max(level_s - finish, 0.0) for finish in finish_s]


def _find_latest_ends(timeline: Timeline, device_of: Sequence[int | None]) -> list[float]:
    """Latest end of each operation for which all passes on other devices start as they did."""
    graph, start = timeline.graph, timeline.start_s.tolist()
    duration = (timeline.end_s - timeline.start_s).tolist()
    latest = [timeline.makespan_s] * len(start)
    next_on_link: dict[int, int] = {}
    for i in reversed(timeline.order):
        lags = dict(graph.laggards.get(i, ()))
        for other in graph.followers[i]:
            device = device_of[other]
            if device is not None and device == device_of[i]:
                continue  # the device's own list sees to that
            begin = start[other] if device is not None else latest[other] - duration[other]
            latest[i] = min(latest[i], begin - lags.get(other, 0.0))
        if device_of[i] is None:
            for queue in graph.held[i]:
                if queue in next_on_link:
                    other = next_on_link[queue]
                    latest[i] = min(latest[i], latest[other] - duration[other])
                next_on_link[queue] = i
    return latest
