"""RLHF as straight-line code on any placement of its models, resharded without a byte kept twice."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "hybridflow needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install hybridflow again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from hybridflow import algos, layout, loops, mapping, reshard, rl, tasks
    from hybridflow.actor import Actor
    from hybridflow.batch import Batch
    from hybridflow.checkpoint import Checkpoint
    from hybridflow.controller import Workers
    from hybridflow.critic import Critic
    from hybridflow.future import Future
    from hybridflow.group import WorkerGroup
    from hybridflow.models.config import PRESETS
    from hybridflow.models.optimizer import AdamW
    from hybridflow.protocols import Mesh, Protocol, remote
    from hybridflow.ragged import Ragged
    from hybridflow.rewards import reward
    from hybridflow.rollout.group import Rollout
    from hybridflow.rollout.sampling import Sampling
    from hybridflow.scoring import CostModel, Reference, RewardModel
    from hybridflow.worker import Worker

__version__ = "0.1.0"

_HOME_OF = {
    "Actor": "actor",
    "AdamW": "models.optimizer",
    "Batch": "batch",
    "Checkpoint": "checkpoint",
    "CostModel": "scoring",
    "Rollout": "rollout.group",
    "PRESETS": "models.config",
    "Critic": "critic",
    "Future": "future",
    "Mesh": "protocols",
    "Protocol": "protocols",
    "Ragged": "ragged",
    "Reference": "scoring",
    "RewardModel": "scoring",
    "Sampling": "rollout.sampling",
    "Worker": "worker",
    "WorkerGroup": "group",
    "Workers": "controller",
    "remote": "protocols",
    "reward": "rewards",
}
_MODULES = ("algos", "layout", "loops", "mapping", "reshard", "rl", "tasks")

__all__ = [
    "PRESETS",
    "Actor",
    "AdamW",
    "Batch",
    "Checkpoint",
    "CostModel",
    "Critic",
    "Future",
    "Mesh",
    "Protocol",
    "Ragged",
    "Reference",
    "RewardModel",
    "Rollout",
    "Sampling",
    "Worker",
    "WorkerGroup",
    "Workers",
    "__version__",
    "algos",
    "layout",
    "loops",
    "mapping",
    "remote",
    "reshard",
    "reward",
    "rl",
    "tasks",
]


def __getattr__(name: str) -> Any:
    # torch takes a second to import, which `hybridflow --help` has no use for.
    if name in _HOME_OF:
        return getattr(import_module(f"hybridflow.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"hybridflow.{name}")
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
