"""Streams of events: real flights, generated streams of any size, and the user's tables."""

from mspipe.data.streams import flights, read_events, zipf

__all__ = ["flights", "read_events", "zipf"]
