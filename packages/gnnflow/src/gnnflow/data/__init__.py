"""Streams of events: departures of flights, generated ones, files and objects of users.

Events, their file formats and the flights are `shared.data`'s; the negatives of a stream that grows
are in `gnnflow.data.negatives`.
"""

from shared.data.flights import departures as flights
from shared.data.formats import read_events
from shared.data.streams import zipf
from shared.data.tables import from_table, from_temporal_data

__all__ = ["flights", "from_table", "from_temporal_data", "read_events", "zipf"]
