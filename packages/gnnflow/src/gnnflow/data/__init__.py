"""Streams of events: real flights, generated ones, and what users have."""

from gnnflow.data.streams import flights, from_table, from_temporal_data, read_events, zipf

__all__ = ["flights", "from_table", "from_temporal_data", "read_events", "zipf"]
