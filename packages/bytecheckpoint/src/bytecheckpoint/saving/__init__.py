"""Saving: a copy of the state in memory, then files written behind training."""
