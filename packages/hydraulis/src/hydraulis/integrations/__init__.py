"""Balanced batches in other projects' training loops."""
