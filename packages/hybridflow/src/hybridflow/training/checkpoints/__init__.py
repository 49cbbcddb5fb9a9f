"""Checkpoints of a run: its worker groups and what its loop remembers."""
