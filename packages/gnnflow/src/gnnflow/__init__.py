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
    from gnnflow.data.events import Events
    from gnnflow.features.cache import FeatureCache
    from gnnflow.features.inputs import Inputs, Rows, attach
    from gnnflow.features.store import FeatureStore
    from gnnflow.graph.temporal_graph import Stats, TemporalGraph
    from gnnflow.partitioning.planner import PartitionSummary, partition, summarize
    from gnnflow.ranks.features import DistributedFeatures
    from gnnflow.ranks.sampler import DistributedSampler, owned, paired, rebalance
    from gnnflow.ranks.trainer import DistributedTrainer
    from gnnflow.sampling.mfg import MFG, Sequences
    from gnnflow.sampling.sampler import TemporalSampler
    from gnnflow.training import evaluation as evaluate
    from gnnflow.training.continual import ContinualTrainer, Round

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
    "features.cache": ("FeatureCache",),
    "training.continual": ("ContinualTrainer", "Round"),
    "ranks.sampler": ("DistributedSampler", "owned", "paired", "rebalance"),
    "ranks.features": ("DistributedFeatures",),
    "ranks.trainer": ("DistributedTrainer",),
    "data.events": ("Events",),
    "features.store": ("FeatureStore",),
    "graph.temporal_graph": ("Stats", "TemporalGraph"),
    "features.inputs": ("Inputs", "Rows", "attach"),
    "sampling.mfg": ("MFG", "Sequences"),
    "partitioning.planner": ("PartitionSummary", "partition", "summarize"),
    "sampling.sampler": ("TemporalSampler",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"data": "data", "evaluate": "training.evaluation", "models": "models"}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"gnnflow.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"gnnflow.{_MODULES[name]}")
    raise AttributeError(f"module 'gnnflow' has no attribute {name!r}")
