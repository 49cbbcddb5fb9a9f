"""Mixture-of-Experts layers: experts over ranks, gates with capacity, and their exchanges."""

from importlib import import_module
from typing import Any

# Public name -> its module, imported at first use.
_HOME = {
    "GATES": "lancet.moe.gates",
    "Layer": "lancet.moe.layer",
    "assign_slots": "lancet.moe.gates",
    "capacity": "lancet.moe.gates",
}
__all__ = ["GATES", "Layer", "assign_slots", "capacity"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lancet.moe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
