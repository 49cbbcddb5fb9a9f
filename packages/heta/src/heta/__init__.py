"""Trains heterogeneous graph networks across hosts: each host aggregates its own relations, one row a seed travels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "heta needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install heta again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from heta import combine, data, nn
    from heta.graph.dgl import from_dgl
    from heta.graph.hetero_graph import HeteroGraph
    from heta.graph.part import Part, load
    from heta.graph.pyg import from_pyg
    from heta.graph.relation_codes import relation_code
    from heta.graph.schema import Schema
    from heta.graph.tables import from_tables
    from heta.partitioning.balance import lpt
    from heta.partitioning.closure import closure
    from heta.partitioning.plan import Plan
    from heta.partitioning.planner import plan
    from heta.rows.cache import Cache, fill_cache
    from heta.rows.optimizers import RowAdagrad, RowAdam
    from heta.training.loader import loader
    from heta.training.trainer import Trainer

__all__ = [
    "Cache",
    "HeteroGraph",
    "Part",
    "Plan",
    "RowAdagrad",
    "RowAdam",
    "Schema",
    "Trainer",
    "closure",
    "combine",
    "data",
    "fill_cache",
    "from_dgl",
    "from_pyg",
    "from_tables",
    "load",
    "loader",
    "lpt",
    "nn",
    "plan",
    "relation_code",
]

__version__ = "0.1.0"

_HOMES = {
    "graph.dgl": ("from_dgl",),
    "graph.hetero_graph": ("HeteroGraph",),
    "graph.part": ("Part", "load"),
    "graph.pyg": ("from_pyg",),
    "graph.relation_codes": ("relation_code",),
    "graph.schema": ("Schema",),
    "graph.tables": ("from_tables",),
    "partitioning.balance": ("lpt",),
    "partitioning.closure": ("closure",),
    "partitioning.plan": ("Plan",),
    "partitioning.planner": ("plan",),
    "rows.cache": ("Cache", "fill_cache"),
    "rows.optimizers": ("RowAdagrad", "RowAdam"),
    "training.loader": ("loader",),
    "training.trainer": ("Trainer",),
}
_MODULES = ("combine", "data", "nn")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"heta.{name}")
    if name in _HOME_OF:
        return getattr(import_module(f"heta.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'heta' has no attribute {name!r}")
