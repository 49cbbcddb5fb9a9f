"""Saving: copies the state in memory, then writes files in the background."""
