"""Times in other units than seconds are asked about, and told as dates."""

import numpy as np
import pytest
import torch

from shared.data.events import Events
from shared.data.time_units import TIME_UNITS, check_seconds, describe_dates, to_seconds
from shared.errors import DataError

BEGIN = 1_356_998_400  # 2013-01-01


def events_of(times, dtype=torch.int64):
    ids = torch.arange(len(times))
    return Events(ids, ids + 1, torch.as_tensor(times, dtype=dtype), ids, ids[:, None].float(), "x")


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_too_large_for_seconds_are_asked_about_and_divided(unit):
    count = TIME_UNITS[unit]
    times = np.array([BEGIN * count, (BEGIN + 86_400) * count])
    told = rf"as {unit} they are 2013-01-01 00:00 to 2013-01-02 00:00 UTC; give --time-unit {unit}"
    with pytest.raises(DataError, match=told):
        check_seconds(events_of(times))
    found = to_seconds(times, unit)
    assert found.dtype == np.int64
    assert found.tolist() == [BEGIN, BEGIN + 86_400]
    assert to_seconds(times, "s") is times
    assert to_seconds(times.astype(float), unit).tolist() == found.tolist()


def test_parts_of_a_second_stay():
    found = to_seconds(np.array([BEGIN * 1000, BEGIN * 1000 + 1]), "ms")
    assert found.dtype == np.float64
    assert found.tolist() == [BEGIN, BEGIN + 0.001]


def test_the_largest_second_is_taken():
    for dtype in (torch.int64, torch.float64):
        check_seconds(events_of([0, 253_402_300_799], dtype))  # the last second of the year 9999
        with pytest.raises(DataError, match="expected seconds, got up to 2"):
            check_seconds(events_of([0, 253_402_300_800], dtype))
    check_seconds(events_of([]))


@pytest.mark.parametrize(
    ("times", "dates"),
    [
        ([BEGIN, BEGIN + 60], "2013-01-01 00:00 to 2013-01-01 00:01 UTC"),
        ([0, BEGIN], None),
        ([BEGIN, BEGIN * 1000], None),
        ([], None),
    ],
)
def test_dates_are_told_of_unix_times(times, dates):
    assert describe_dates(events_of(times)) == dates
