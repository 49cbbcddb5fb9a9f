"""RLHF as straight-line code on any placement of its models, with zero-redundancy resharding."""

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
    from hybridflow import algorithms as algos
    from hybridflow import mapping, reshard, rl, tasks
    from hybridflow.algorithms import loops
    from hybridflow.models.config import PRESETS
    from hybridflow.models.optimizer import AdamW
    from hybridflow.roles.actor import Actor
    from hybridflow.roles.critic import Critic
    from hybridflow.roles.rollout import Rollout
    from hybridflow.roles.scoring import CostModel, Reference, RewardModel
    from hybridflow.rollout.sampling import Sampling
    from hybridflow.tasks.rewards import reward
    from hybridflow.training.checkpoints.checkpoint import Checkpoint
    from hybridflow.workers.batch import layout
    from hybridflow.workers.batch.batch import Batch
    from hybridflow.workers.batch.ragged import Ragged
    from hybridflow.workers.controller import Workers
    from hybridflow.workers.future import Future
    from hybridflow.workers.protocols import Mesh, Protocol, remote
    from hybridflow.workers.worker import Worker
    from hybridflow.workers.worker_group import WorkerGroup

__version__ = "0.1.0"

_HOME_OF = {
    "Actor": "roles.actor",
    "AdamW": "models.optimizer",
    "Batch": "workers.batch.batch",
    "Checkpoint": "training.checkpoints.checkpoint",
    "CostModel": "roles.scoring",
    "Rollout": "roles.rollout",
    "PRESETS": "models.config",
    "Critic": "roles.critic",
    "Future": "workers.future",
    "Mesh": "workers.protocols",
    "Protocol": "workers.protocols",
    "Ragged": "workers.batch.ragged",
    "Reference": "roles.scoring",
    "RewardModel": "roles.scoring",
    "Sampling": "rollout.sampling",
    "Worker": "workers.worker",
    "WorkerGroup": "workers.worker_group",
    "Workers": "workers.controller",
    "remote": "workers.protocols",
    "reward": "tasks.rewards",
}
_MODULES = {
    "algos": "algorithms",
    "layout": "workers.batch.layout",
    "loops": "algorithms.loops",
    "mapping": "mapping",
    "reshard": "reshard",
    "rl": "rl",
    "tasks": "tasks",
}

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
    # Lazy, because torch takes a second to import, and `hybridflow --help` does not need it.
    if name in _HOME_OF:
        return getattr(import_module(f"hybridflow.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"hybridflow.{_MODULES[name]}")
    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
