"""Trains on unequal devices together: slow ranks lower the operators that cost the gradient least."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "qsync needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install qsync again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from qsync.diagnosis.diagnose import diagnose
    from qsync.integrations.ddp import DDP
    from qsync.planner.allocator import recover_precision
    from qsync.planner.cost_mapper import CostMapper
    from qsync.planner.graph import Graph, Op
    from qsync.planner.plan import Plan
    from qsync.planner.replayer import bucket_ends
    from qsync.profiler.indicator import sensitivity
    from qsync.profiler.noise import forward_noise
    from qsync.profiler.planning import plan
    from qsync.runtime.apply import apply
    from qsync.runtime.products import linear
    from qsync.runtime.quantizers import fake_quantize

__all__ = [
    "DDP",
    "CostMapper",
    "Graph",
    "Op",
    "Plan",
    "apply",
    "bucket_ends",
    "diagnose",
    "fake_quantize",
    "forward_noise",
    "linear",
    "plan",
    "recover_precision",
    "sensitivity",
]

__version__ = "0.1.0"

# Module -> its public names, imported at first use so that `qsync --help` stays fast.
_HOMES = {
    "diagnosis.diagnose": ("diagnose",),
    "planner.allocator": ("recover_precision",),
    "planner.cost_mapper": ("CostMapper",),
    "planner.graph": ("Graph", "Op"),
    "planner.plan": ("Plan",),
    "planner.replayer": ("bucket_ends",),
    "profiler.indicator": ("sensitivity",),
    "profiler.noise": ("forward_noise",),
    "profiler.planning": ("plan",),
    "runtime.apply": ("apply",),
    "integrations.ddp": ("DDP",),
    "runtime.products": ("linear",),
    "runtime.quantizers": ("fake_quantize",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"qsync.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'qsync' has no attribute {name!r}")
