"""Lose a rank and nothing else: recovered in a fraction of a second, bit for bit."""

import importlib
from typing import Any

import shared

# Other distributions install a module of this name too, and theirs may have replaced ours.
if getattr(shared, "__project__", None) != "meshyard":
    raise ImportError(
        "swift needs Meshyard's own module 'shared', but Python found another one at "
        f"{getattr(shared, '__file__', None) or list(getattr(shared, '__path__', []))}. "
        "Rename that file or folder if it is yours; uninstall that distribution if it is not "
        "(`pip uninstall shared`), then install swift again: "
        "`pip install --force-reinstall --no-deps ./shared`."
    )

__version__ = "0.1.0"

# Public name -> its module, imported at first use so that `meshyard-swift --help` stays fast.
_HOME = {
    "BoundaryLog": "swift.pipeline.log",
    "DataParallel": "swift.training.reducer",
    "Every": "swift.training.checkpoints",
    "PipelineStage": "swift.pipeline.stage",
    "Sharded": "swift.training.sharded",
    "Stage": "swift.pipeline.assigned_stage",
    "StepData": "swift.training.data",
    "decide": "swift.recovery.planner",
    "join": "swift.training.runtime",
    "select_logs": "swift.pipeline.selection",
    "undoable": "swift.undo.undoable",
}
__all__ = [
    "BoundaryLog",
    "DataParallel",
    "Every",
    "PipelineStage",
    "Sharded",
    "Stage",
    "StepData",
    "__version__",
    "decide",
    "join",
    "select_logs",
    "undoable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'swift' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
