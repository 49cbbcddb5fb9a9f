"""Temporal graph networks that remember, trained with their memory's traffic off the critical path."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "mspipe needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install mspipe again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from mspipe import data, evaluation, memory, models, planner
    from mspipe.data.batching import Batch, batches
    from mspipe.data.events import Events
    from mspipe.data.negatives import Negatives
    from mspipe.data.sampler import Sampler
    from mspipe.evaluation import EdgeBank, evaluate, score_links
    from mspipe.memory.node_memory import NodeMemory
    from mspipe.models import mail_dim
    from mspipe.models.hooked import Hooked
    from mspipe.pipeline.iteration import Output
    from mspipe.pipeline.mitigation import Mitigation
    from mspipe.pipeline.pipeline import Pipeline
    from mspipe.pipeline.report import Report
    from mspipe.planner import Plan, plan
    from mspipe.simulator import Simulation, simulate
    from mspipe.training import Epoch, Settings, fit, restore

__version__ = "0.1.0"

_HOME_OF = {
    "Batch": "data.batching",
    "EdgeBank": "evaluation",
    "Epoch": "training",
    "Events": "data.events",
    "Hooked": "models.hooked",
    "Mitigation": "pipeline.mitigation",
    "Negatives": "data.negatives",
    "NodeMemory": "memory.node_memory",
    "Output": "pipeline.iteration",
    "Pipeline": "pipeline.pipeline",
    "Plan": "planner",
    "Report": "pipeline.report",
    "Sampler": "data.sampler",
    "Settings": "training",
    "Simulation": "simulator",
    "batches": "data.batching",
    "evaluate": "evaluation",
    "fit": "training",
    "mail_dim": "models",
    "plan": "planner",
    "restore": "training",
    "score_links": "evaluation",
    "simulate": "simulator",
}
_MODULES = ("data", "evaluation", "memory", "models", "planner")

__all__ = [
    "Batch",
    "EdgeBank",
    "Epoch",
    "Events",
    "Hooked",
    "Mitigation",
    "Negatives",
    "NodeMemory",
    "Output",
    "Pipeline",
    "Plan",
    "Report",
    "Sampler",
    "Settings",
    "Simulation",
    "__version__",
    "batches",
    "data",
    "evaluate",
    "evaluation",
    "fit",
    "mail_dim",
    "memory",
    "models",
    "plan",
    "planner",
    "restore",
    "score_links",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # torch takes a second to import, which `mspipe --help` has no use for.
    if name in _HOME_OF:
        return getattr(import_module(f"mspipe.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"mspipe.{name}")
    raise AttributeError(f"module 'mspipe' has no attribute {name!r}")
