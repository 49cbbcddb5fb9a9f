"""Hides the all-to-alls of Mixture-of-Experts models under the whole training step.

After Lancet (MLSys 2024, arXiv 2404.19429).
"""

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
_HOME = {
    "Backend": "lancet.runtime.backend",
    "Op": "lancet.graph.operations",
    "assign_dw": "lancet.planner.weight_gradients",
    "axes": "lancet.graph",
    "best_ranges": "lancet.planner.partition",
    "clip_grad_norm_": "lancet.moe.export",
    "export": "lancet.moe.export",
    "fuse": "lancet.planner.fusion",
    "moe": "lancet",
    "parallelize": "lancet.moe.experts",
    "pipelined_s": "lancet.planner.pipeline",
    "schedule": "lancet.planner.weight_gradients",
    "simulate": "lancet.simulator",
}
__all__ = [
    "Backend",
    "Op",
    "__version__",
    "assign_dw",
    "axes",
    "best_ranges",
    "clip_grad_norm_",
    "export",
    "fuse",
    "moe",
    "parallelize",
    "pipelined_s",
    "schedule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lancet' has no attribute {name!r}")
    home = _HOME[name]
    if name in ("axes", "moe"):  # modules
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)
