"""Temporal graph networks, trained while their graph grows.

After GNNFlow (arXiv 2311.17410): a graph of timestamped edges that takes batches of any order and
size, samples exactly as of any time, and feeds models that train on as events arrive. Names are
loaded on first use, so that `gnnflow --help` never waits for torch.
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
    from gnnflow.training.continual import ContinualTrainer, Round
    from gnnflow.training.settings import Settings
    from shared.data import metrics as evaluate
    from shared.data.events import Events

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
    "Settings",
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
    "gnnflow.features.cache": ("FeatureCache",),
    "gnnflow.features.inputs": ("Inputs", "Rows", "attach"),
    "gnnflow.features.store": ("FeatureStore",),
    "gnnflow.graph.temporal_graph": ("Stats", "TemporalGraph"),
    "gnnflow.partitioning.planner": ("PartitionSummary", "partition", "summarize"),
    "gnnflow.ranks.features": ("DistributedFeatures",),
    "gnnflow.ranks.sampler": ("DistributedSampler", "owned", "paired", "rebalance"),
    "gnnflow.ranks.trainer": ("DistributedTrainer",),
    "gnnflow.sampling.mfg": ("MFG", "Sequences"),
    "gnnflow.sampling.sampler": ("TemporalSampler",),
    "gnnflow.training.continual": ("ContinualTrainer", "Round"),
    "gnnflow.training.settings": ("Settings",),
    "shared.data.events": ("Events",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"data": "gnnflow.data", "evaluate": "shared.data.metrics", "models": "gnnflow.models"}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'gnnflow' has no attribute {name!r}")
