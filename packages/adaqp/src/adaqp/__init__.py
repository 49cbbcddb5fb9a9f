"""Full-graph GNN training across hosts: adaptively quantised messages, overlapped with compute.

An implementation of "Adaptive Message Quantization and Parallelization for Distributed Full-graph
GNN Training" (MLSys 2023, arXiv 2306.01381): `partition` cuts a graph, `load` loads a rank's share,
models are built from `dg.aggregate` and `dg.halo`, a policy sets the widths of messages, and
`Trainer` trains. Names are imported on first use, so that `adaqp --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions also install a module of this name, which may have overwritten ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "adaqp needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install adaqp again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from adaqp.graphs import generated as data
    from adaqp.graphs.graph import Graph, from_dgl, from_edge_index, from_pyg
    from adaqp.messages.distgraph import DistGraph, load
    from adaqp.messages.network import LinkTable
    from adaqp.messages.runtime import Messages
    from adaqp.partitioning.partitioner import partition
    from adaqp.planner.planner import Assignment, Solution, assign
    from adaqp.policy import Adaptive, Drop, Exact, Fixed, Stale
    from adaqp.training import nn
    from adaqp.training.trainer import History, Trainer

__all__ = [
    "Adaptive",
    "Assignment",
    "DistGraph",
    "Drop",
    "Exact",
    "Fixed",
    "Graph",
    "History",
    "LinkTable",
    "Messages",
    "Solution",
    "Stale",
    "Trainer",
    "assign",
    "data",
    "from_dgl",
    "from_edge_index",
    "from_pyg",
    "load",
    "nn",
    "partition",
]

__version__ = "0.1.0"

_HOMES = {
    "messages.distgraph": ("DistGraph", "load"),
    "graphs.graph": ("Graph", "from_dgl", "from_edge_index", "from_pyg"),
    "messages.network": ("LinkTable",),
    "partitioning.partitioner": ("partition",),
    "planner.planner": ("Assignment", "Solution", "assign"),
    "policy": ("Adaptive", "Drop", "Exact", "Fixed", "Stale"),
    "messages.runtime": ("Messages",),
    "training.trainer": ("History", "Trainer"),
}
_MODULES = {"data": "graphs.generated", "nn": "training.nn"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"adaqp.{_MODULES[name]}")
    if name in _HOME_OF:
        return getattr(import_module(f"adaqp.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'adaqp' has no attribute {name!r}")
