"""Units of a stream's times: seconds are expected, and others are recognised by their size."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from shared.data.events import Events
from shared.errors import DataError

__all__ = ["TIME_UNITS", "check_seconds", "describe_dates", "guess_unit", "to_seconds"]

# How many make a second.
TIME_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Seconds since 1970 pass it after the year 9999, which stands for "for ever"; milliseconds have
# since 1978.
_LARGEST_S = 253_402_300_799
# Before March 1973: times count from somewhere else.
_OLDEST_DATE_S = 1e8


def to_seconds(times: np.ndarray, unit: str) -> np.ndarray:
    """Times in seconds.

    Args:
        times: whole numbers or floats [num_times].
        unit: their unit, a name of `TIME_UNITS`.

    Returns:
        Whole numbers where all are whole seconds, else float64, which tells Unix times apart by a
        quarter of a microsecond.
    """
    per_second = TIME_UNITS[unit]
    if per_second == 1:
        return times
    is_whole = times.dtype.kind in "iu" and not (times % per_second).any()
    return times // per_second if is_whole else times / float(per_second)


def check_seconds(events: Events) -> None:
    """Refuses times that are too large for seconds.

    Raises:
        DataError: it says which unit they may have, and what dates that gives.
    """
    newest = events.t.max().item() if len(events) else 0
    if guess := guess_unit(newest):
        oldest = events.t.min().item()
        dates = (
            _describe(oldest / TIME_UNITS[guess], newest / TIME_UNITS[guess]) or "no dates either"
        )
        raise DataError(
            f"times: expected seconds, got up to {newest}, beyond the year 9999; as {guess} they "
            f"are {dates}; give --time-unit {guess}, or another of {', '.join(TIME_UNITS)}"
        )


def describe_dates(events: Events) -> str | None:
    """From when to when, as UTC dates; None where times in seconds are no dates since 1973."""
    return _describe(events.t.min().item(), events.t.max().item()) if len(events) else None


def guess_unit(newest: float) -> str | None:
    """The unit that makes a time a date before the year 10000; None if seconds do.

    Args:
        newest: the largest time of a stream.
    """
    if newest <= _LARGEST_S:
        return None
    return next((unit for unit, count in TIME_UNITS.items() if newest <= _LARGEST_S * count), "ns")


def _describe(oldest: float, newest: float) -> str | None:
    if not _OLDEST_DATE_S <= oldest <= newest <= _LARGEST_S:
        return None
    first, last = (f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M}" for end in (oldest, newest))
    return f"{first} to {last} UTC"
