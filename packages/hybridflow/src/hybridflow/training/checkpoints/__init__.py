"""Checkpoints of a run: the state of its worker groups and of its loop."""
