"""Train at the length you want in the memory you have, with no knob to turn."""

import importlib
from typing import Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "memo needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install memo again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

__version__ = "0.1.0"

# Public name -> its module, imported at first use so that `memo --help` stays fast.
_HOME = {
    "Budget": "memo.config",
    "DoesNotFit": "memo.config",
    "Plan": "memo.planner.plan",
    "Trace": "memo.planner.addresses",
    "alpha": "memo.planner.fractions",
    "alphas": "memo.planner.fractions",
    "apply": "memo.runtime.run",
    "autotune": "memo.profiler.autotune",
    "emulate": "memo.planner.addresses",
    "pack": "memo.planner.addresses",
    "skeleton": "memo.planner.skeleton",
}
__all__ = [
    "Budget",
    "DoesNotFit",
    "Plan",
    "Trace",
    "__version__",
    "alpha",
    "alphas",
    "apply",
    "autotune",
    "emulate",
    "pack",
    "skeleton",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
