"""Builds what commands work on: a model, its batches and its loss function, by a name on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import ConfigError

if TYPE_CHECKING:
    from qsync.profiler.gradients import LossFunction

__all__ = ["TrainingJob", "build_job"]


class TrainingJob(NamedTuple):
    """A model, its training batches, and a loss function of (model, batch)."""

    model: Any
    batches: Iterable[Any]
    loss_fn: LossFunction


def build_job(text: str) -> TrainingJob:
    """Calls a function that builds a job.

    Args:
        text: "module:function", looked up in the working directory too, or "file.py:function".

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    home, _, name = text.rpartition(":")
    if not home:
        raise ConfigError(
            f"build: expected module:function or file.py:function, got {text!r}; name the function "
            "that returns model, batches and loss function"
        )
    try:
        build = getattr(_import(home), name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"build: expected a function {text!r}, got {error}; check both names"
        ) from error
    job = build()
    if not isinstance(job, tuple) or len(job) != 3 or not callable(job[2]):
        raise ConfigError(
            f"build: expected {name}() to return model, batches and loss function, got "
            f"{type(job).__name__}; return these three"
        )
    return TrainingJob(*job)


def _import(home: str) -> Any:
    if not home.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return import_module(home)
    spec = spec_from_file_location(Path(home).stem, home)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # as its dataclasses and pickles ask for
    sys.path.append(str(Path(home).parent.absolute()))  # and its own imports
    spec.loader.exec_module(module)
    return module
