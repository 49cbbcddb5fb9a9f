"""Graphs to train on: real flights, a generated one of ogbn-mag's schema, and one's own by name.

Names are imported on first use, so that the command line can list graphs without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heta.data.mag import mag_like
    from heta.data.nycflights import flights

__all__ = ["flights", "mag_like"]

_HOMES = {"flights": "nycflights", "mag_like": "mag"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"heta.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'heta.data' has no attribute {name!r}")
