"""Search over placements and layouts of the models of an RLHF step; all times are simulated.

After the auto-mapping of "HybridFlow: A Flexible and Efficient RLHF Framework" (arXiv 2409.19256).
Describe the models, the cluster and one step; `search` returns a plan with an explanation.

Names are imported lazily, so that the command line lists models and steps without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.mapping.cost import CostModel
    from hybridflow.mapping.degrees import GenerationLayout
    from hybridflow.mapping.evaluation import evaluate
    from hybridflow.mapping.front import Choice
    from hybridflow.mapping.hardware import Efficiency, Hardware
    from hybridflow.mapping.models import ModelSpec
    from hybridflow.mapping.plan import Alternative, Mapping, ModelPlan, SetPlan
    from hybridflow.mapping.planner import search
    from hybridflow.mapping.workload import Workload
    from hybridflow.workers.batch.layout import Layout

__all__ = [
    "Alternative",
    "Choice",
    "CostModel",
    "Efficiency",
    "GenerationLayout",
    "Hardware",
    "Layout",
    "Mapping",
    "ModelPlan",
    "ModelSpec",
    "SetPlan",
    "Workload",
    "evaluate",
    "search",
]

_HOME = {
    "CostModel": "hybridflow.mapping.cost",
    "GenerationLayout": "hybridflow.mapping.degrees",
    "evaluate": "hybridflow.mapping.evaluation",
    "Choice": "hybridflow.mapping.front",
    "Efficiency": "hybridflow.mapping.hardware",
    "Hardware": "hybridflow.mapping.hardware",
    "ModelSpec": "hybridflow.mapping.models",
    "Alternative": "hybridflow.mapping.plan",
    "Mapping": "hybridflow.mapping.plan",
    "ModelPlan": "hybridflow.mapping.plan",
    "SetPlan": "hybridflow.mapping.plan",
    "search": "hybridflow.mapping.planner",
    "Workload": "hybridflow.mapping.workload",
    "Layout": "hybridflow.workers.batch.layout",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
