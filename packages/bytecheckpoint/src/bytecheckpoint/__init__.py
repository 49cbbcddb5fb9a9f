"""Checkpoints that block training for a copy, survive any crash and load into any layout.

An implementation of "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model
Development" (NSDI 2025, arXiv 2407.20143): a `Checkpointer` saves the training state in a form that
does not depend on the parallel layout, and loads it into any layout. Names are imported on first
use, so that `bytecheckpoint --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import shared

# Other distributions also install a module of this name, which may have overwritten ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "bytecheckpoint needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install bytecheckpoint again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

if TYPE_CHECKING:
    from bytecheckpoint.checkpointer import Checkpointer
    from bytecheckpoint.integrations.dcp_storage import DCPReader, DCPWriter
    from bytecheckpoint.loading.checkpoint import Checkpoint, open
    from bytecheckpoint.loading.loading import LoadReport
    from bytecheckpoint.loading.one_checkpoint import load
    from bytecheckpoint.loading.rates import Rates
    from bytecheckpoint.saving.job import Handle
    from bytecheckpoint.saving.one_checkpoint import save
    from bytecheckpoint.state.loader_state import LoaderState
    from bytecheckpoint.state.local_tensors import FlatShard
    from bytecheckpoint.state.rng import rng_state

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "DCPReader",
    "DCPWriter",
    "FlatShard",
    "Handle",
    "LoadReport",
    "LoaderState",
    "Rates",
    "load",
    "open",
    "rng_state",
    "save",
]

__version__ = "0.1.0"

_HOMES = {
    "checkpointer": ("Checkpointer",),
    "integrations.dcp_storage": ("DCPReader", "DCPWriter"),
    "saving.job": ("Handle",),
    "saving.one_checkpoint": ("save",),
    "state.loader_state": ("LoaderState",),
    "loading.loading": ("LoadReport",),
    "loading.one_checkpoint": ("load",),
    "loading.checkpoint": ("Checkpoint", "open"),
    "loading.rates": ("Rates",),
    "state.rng": ("rng_state",),
    "state.local_tensors": ("FlatShard",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"bytecheckpoint.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'bytecheckpoint' has no attribute {name!r}")
