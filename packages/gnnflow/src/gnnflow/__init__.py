"""Temporal graph networks, trained while their graph grows.

The practical form of GNNFlow: a graph of timestamped edges that takes new ones in any order and size,
answers every query about the past exactly, and feeds models that learn on as events arrive. Names
are loaded on first use, so that `gnnflow --help` never waits for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "gnnflow needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install gnnflow again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from gnnflow import data, models
    from gnnflow import evaluation as evaluate
    from gnnflow.cache import FeatureCache
    from gnnflow.continual import ContinualTrainer, Round
    from gnnflow.distributed import DistributedSampler, owned, paired, rebalance
    from gnnflow.distributed_features import DistributedFeatures
    from gnnflow.distributed_training import DistributedTrainer
    from gnnflow.events import Events
    from gnnflow.features import FeatureStore
    from gnnflow.graph import Stats, TemporalGraph
    from gnnflow.inputs import Inputs, Rows, attach
    from gnnflow.mfg import MFG, Sequences
    from gnnflow.partitioner import PartitionSummary, partition, summarize
    from gnnflow.sampler import TemporalSampler

__all__ = [
    "MFG",
    "ContinualTrainer",
    "DistributedFeatures",
    "DistributedSampler",
    "DistributedTrainer",
    "Events",
    "FeatureCache",
    "FeatureStore",
    "Inputs",
    "PartitionSummary",
    "Round",
    "Rows",
    "Sequences",
    "Stats",
    "TemporalGraph",
    "TemporalSampler",
    "attach",
    "data",
    "evaluate",
    "models",
    "owned",
    "paired",
    "partition",
    "rebalance",
    "summarize",
]

__version__ = "0.1.0"

_HOMES = {
    "cache": ("FeatureCache",),
    "continual": ("ContinualTrainer", "Round"),
    "distributed": ("DistributedSampler", "owned", "paired", "rebalance"),
    "distributed_features": ("DistributedFeatures",),
    "distributed_training": ("DistributedTrainer",),
    "events": ("Events",),
    "features": ("FeatureStore",),
    "graph": ("Stats", "TemporalGraph"),
    "inputs": ("Inputs", "Rows", "attach"),
    "mfg": ("MFG", "Sequences"),
    "partitioner": ("PartitionSummary", "partition", "summarize"),
    "sampler": ("TemporalSampler",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"data": "data", "evaluate": "evaluation", "models": "models"}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"gnnflow.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"gnnflow.{_MODULES[name]}")
    raise AttributeError(f"module 'gnnflow' has no attribute {name!r}")
