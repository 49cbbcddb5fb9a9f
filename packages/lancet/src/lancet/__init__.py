"""Sums of many ranges of one array by prefix sums: the placeholder of a new package."""

import importlib
from typing import Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "lancet needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install lancet again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

__version__ = "0.1.0"

# Public name -> its module, imported at first use so that `lancet --help` stays fast.
_HOME = {"METHODS": "lancet.summing.registry", "range_sums": "lancet.summing.ranges"}
__all__ = ["METHODS", "__version__", "range_sums"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lancet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
