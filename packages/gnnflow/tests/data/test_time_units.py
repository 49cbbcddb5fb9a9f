"""Times in other units than seconds are asked about, and told as dates."""

import pytest
import torch

from gnnflow.cli import main
from gnnflow.data.time_units import TIME_UNITS, check_span, describe_dates, to_seconds
from shared.data.events import Events
from shared.errors import DataError

BEGIN = 1_356_998_400  # 2013-01-01


def events_of(times, dtype=torch.int64):
    ids = torch.arange(len(times))
    return Events(ids, ids + 1, torch.tensor(times, dtype=dtype), ids, ids[:, None].float(), "x")


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_too_large_for_seconds_are_asked_about_and_divided(unit):
    count = TIME_UNITS[unit]
    events = events_of([BEGIN * count, (BEGIN + 86_400) * count])
    told = rf"as {unit} they are 2013-01-01 00:00 to 2013-01-02 00:00 UTC; give --time-unit {unit}"
    with pytest.raises(DataError, match=told):
        to_seconds(events)
    found = to_seconds(events, unit)
    assert found.t.dtype == torch.int64
    assert found.t.tolist() == [BEGIN, BEGIN + 86_400]
    for name in ("src", "dst", "eid", "features"):
        assert torch.equal(getattr(found, name), getattr(events, name))
    assert to_seconds(events, "s") is events


def test_parts_of_a_second_stay():
    found = to_seconds(events_of([BEGIN * 1000, BEGIN * 1000 + 1]), "ms")
    assert found.t.dtype == torch.float64
    assert found.t.tolist() == [BEGIN, BEGIN + 0.001]


def test_the_largest_second_is_taken():
    for dtype in (torch.int64, torch.float64):
        assert to_seconds(events_of([0, 10**11], dtype)).t[-1] == 10**11
        with pytest.raises(DataError, match="expected seconds, got up to 1"):
            to_seconds(events_of([0, 10**11 + 1], dtype))
    assert len(to_seconds(events_of([]))) == 0


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


def test_a_length_with_a_unit_needs_seconds():
    events = events_of([BEGIN * 1000, BEGIN * 1000 + 5])
    with pytest.raises(DataError, match=r"every: expected times in seconds for '1D'.*look like ms"):
        check_span("every", "1D", events)
    for value, stream in ((500, events), ("500", events), (None, events), ("1D", events_of([5]))):
        check_span("every", value, stream)


def test_the_command_line_asks_for_the_unit_and_prints_dates(tmp_path, capsys):
    path = tmp_path / "clicks.csv"
    rows = [f"{n % 7},{7 + n % 5},{(BEGIN + 3600 * n) * 1000}" for n in range(120)]
    path.write_text("\n".join(["src,dst,t", *rows]))
    options = ["--dim", "8", "--fanouts", "2", "--model", "tf-tgn", "--out", str(tmp_path / "out")]
    run = ["continual", str(path), "--every", "1D", *options]
    assert main(run) == 1
    assert "give --time-unit ms" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*run, "--time-unit", "ms"]) == 0
    told = capsys.readouterr()
    assert "clicks.csv: 2013-01-01 00:00 to 2013-01-05 23:00 UTC" in told.err
    # Of five days the first and a half are learnt first; the rest lies in four days of increments.
    assert told.out.startswith("4 rounds")
    assert main(["info", str(path), "--time-unit", "ms"]) == 0
    assert "2013-01-01 00:00 to 2013-01-05 23:00 UTC" in capsys.readouterr().out
