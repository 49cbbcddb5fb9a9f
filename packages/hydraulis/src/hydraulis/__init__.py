"""Balanced training on documents of any length: every rank finishes at the same time."""

import importlib
from typing import Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "hydraulis needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install hydraulis again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

__version__ = "0.1.0"

# Public name -> its module, imported at first use so that `hydraulis --help` stays fast.
_HOME = {
    "BalancedBatchSampler": "hydraulis.data",
    "Cost": "hydraulis.config",
    "Engine": "hydraulis.runtime.engine",
    "Replica": "hydraulis.config",
    "ReplicaShape": "hydraulis.planner.proposals",
    "SequenceTooLong": "hydraulis.config",
    "StepLoader": "hydraulis.runtime.step_loader",
    "balance": "hydraulis.integrations.trainer",
    "dispatch": "hydraulis.planner.dispatch",
    "layout_boxes": "hydraulis.planner.layouts",
    "measure_cost": "hydraulis.profiler.timings",
    "pack": "hydraulis.planner.packing",
    "pipeline_s": "hydraulis.planner.pipeline",
    "propose": "hydraulis.planner.proposals",
    "token_cap": "hydraulis.config",
    "use_document_attention": "hydraulis.runtime.attention",
}
_MODULES = {
    "data": "hydraulis.data",
    "flexsp": "hydraulis.planner.flexsp",
    "galvatron": "hydraulis.planner.galvatron",
}
__all__ = [
    "BalancedBatchSampler",
    "Cost",
    "Engine",
    "Replica",
    "ReplicaShape",
    "SequenceTooLong",
    "StepLoader",
    "__version__",
    "balance",
    "data",
    "dispatch",
    "flexsp",
    "galvatron",
    "layout_boxes",
    "measure_cost",
    "pack",
    "pipeline_s",
    "propose",
    "token_cap",
    "use_document_attention",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'hydraulis' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
