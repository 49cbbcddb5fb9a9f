"""Units of a stream's times: seconds are expected, and others are recognised by their size."""

from __future__ import annotations

from datetime import UTC, datetime

from shared.data.events import Events
from shared.errors import DataError

__all__ = ["TIME_UNITS", "check_span", "describe_dates", "to_seconds"]

# How many make a second.
TIME_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Seconds since 1970 pass it in the year 5138, milliseconds have since 1973.
_LARGEST_S = 1e11
# Before March 1973: times count from somewhere else.
_OLDEST_DATE_S = 1e8


def to_seconds(events: Events, unit: str | None = None) -> Events:
    """The events with their times in seconds.

    Args:
        events: in any order.
        unit: a name of `TIME_UNITS`; None expects seconds, or any unit of times that are small.

    Returns:
        The events; times that are no whole seconds become float64, which tells Unix times apart by a
        quarter of a microsecond.

    Raises:
        DataError: no unit is given, and times are too large for seconds.
    """
    if unit is None:
        newest = events.t.max().item() if len(events) else 0
        if newest > _LARGEST_S:
            guess = _guess_unit(newest)
            dates = describe_dates(to_seconds(events, guess)) or "no dates either"
            raise DataError(
                f"times: expected seconds, got up to {newest}, beyond the year 5000; as {guess} they "
                f"are {dates}; give --time-unit {guess}, or another of {', '.join(TIME_UNITS)}"
            )
        return events
    per_second = TIME_UNITS[unit]
    if per_second == 1:
        return events
    is_whole = not events.t.is_floating_point() and not bool((events.t % per_second).any())
    t = events.t // per_second if is_whole else events.t.double() / per_second
    return Events(events.src, events.dst, t, events.eid, events.features, events.label)


def check_span(name: str, value: object, events: Events) -> None:
    """Refuses a length such as "1D" for a stream whose times are too large for seconds.

    Args:
        name: of the setting.
        value: its value; numbers are in the stream's own unit, and pass.
        events: by time.

    Raises:
        DataError: times would be beyond the year 5000.
    """
    if not isinstance(value, str) or not any(map(str.isalpha, value)) or not len(events):
        return
    newest = events.t[-1].item()
    if newest > _LARGEST_S:
        guess = _guess_unit(newest)
        raise DataError(
            f"{name}: expected times in seconds for {value!r}, got up to {newest}, which look like "
            f"{guess}; divide them by {TIME_UNITS[guess]:,}, or give a number in their own unit"
        )


def describe_dates(events: Events) -> str | None:
    """From when to when, as UTC dates; None where times in seconds are no dates since 1973."""
    if not len(events):
        return None
    ends = [events.t.min().item(), events.t.max().item()]
    if not _OLDEST_DATE_S <= ends[0] <= ends[1] <= _LARGEST_S:
        return None
    first, last = (f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M}" for end in ends)
    return f"{first} to {last} UTC"


def _guess_unit(newest: float) -> str:
    fitting = (unit for unit, count in TIME_UNITS.items() if newest <= _LARGEST_S * count)
    return next(fitting, "ns")
