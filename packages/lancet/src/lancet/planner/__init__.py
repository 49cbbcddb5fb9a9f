"""Planning without devices: launch orders, ranges and their parts, fused groups, memory, axes."""

from lancet.planner import axes

__all__ = ["axes"]
