"""Graphs to train on without a download: real flights, and a generated one of ogbn-mag's schema."""

from heta.data.mag import mag_like
from heta.data.nycflights import flights

__all__ = ["flights", "mag_like"]
