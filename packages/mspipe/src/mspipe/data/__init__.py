"""Streams of events: real flights, a generated stream of any size, and tables that users have."""

from mspipe.data.streams import flights, read_table, zipf

__all__ = ["flights", "read_table", "zipf"]
