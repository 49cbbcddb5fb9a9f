"""One language model over unequal devices, planned for a quality you can name."""

import importlib
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "llmpq needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install llmpq again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from llmpq.config import ModelSpec, Quality, Workload
    from llmpq.planner.plan import Plan, Stage
    from llmpq.planner.problem import InfeasiblePlan, Problem, batch_s
    from llmpq.planner.search import plan, solve
    from llmpq.profiler.sensitivity import output_noise, sensitivity
    from llmpq.runtime.linear import fastest_form
    from llmpq.runtime.loader import load
    from llmpq.runtime.pipeline import Pipeline
    from llmpq.simulator import simulate

__version__ = "0.1.0"

# Public name -> its module, imported at first use so that `llmpq --help` stays fast.
_HOME = {
    "InfeasiblePlan": "planner.problem",
    "ModelSpec": "config",
    "Pipeline": "runtime.pipeline",
    "Plan": "planner.plan",
    "Problem": "planner.problem",
    "Quality": "config",
    "Stage": "planner.plan",
    "Workload": "config",
    "batch_s": "planner.problem",
    "fastest_form": "runtime.linear",
    "load": "runtime.loader",
    "output_noise": "profiler.sensitivity",
    "plan": "planner.search",
    "sensitivity": "profiler.sensitivity",
    "simulate": "simulator",
    "solve": "planner.search",
}
__all__ = [
    "InfeasiblePlan",
    "ModelSpec",
    "Pipeline",
    "Plan",
    "Problem",
    "Quality",
    "Stage",
    "Workload",
    "__version__",
    "batch_s",
    "fastest_form",
    "load",
    "output_noise",
    "plan",
    "sensitivity",
    "simulate",
    "solve",
]


_ROOMS = (
    "cli", "config", "data", "demo", "evaluation", "integrations", "planner", "profiler", "report",
    "runtime", "simulator",
)  # fmt: skip
"""Modules and folders, imported at first use too: `llmpq.data`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"llmpq.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'llmpq' has no attribute {name!r}")
    return getattr(importlib.import_module(f"llmpq.{_HOME[name]}"), name)
