"""Search over placements and layouts of the models of an RLHF step; all times are simulated.

After the auto-mapping of "HybridFlow: A Flexible and Efficient RLHF Framework" (arXiv 2409.19256).
Describe the models, the cluster and one step; `search` returns a plan with an explanation.
"""

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
