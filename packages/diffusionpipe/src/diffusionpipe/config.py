"""What commands are given: a job with its batches, named on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from diffusionpipe.job.job import Job

__all__ = ["build_job"]


def build_job(text: str) -> tuple[Job, Iterable[Any]]:
    """Calls a function that builds a job and its batches.

    Args:
        text: "module:function", looked up in the working directory too, or "file.py:function".

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    home, _, name = text.rpartition(":")
    try:
        build = getattr(_import(home), name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ConfigError(
            f"build: expected module:function or file.py:function that returns a job and its batches, "
            f"got {text!r} ({error}); check both names"
        ) from error
    result = build()
    if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[0], "components"):
        raise ConfigError(
            f"build: expected {name}() to return a diffusionpipe.Job and batches, got "
            f"{type(result).__name__}; return these two"
        )
    return result


def _import(home: str) -> Any:
    if not home.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return import_module(home)
    # As for a script, modules beside the file can be imported.
    folder = str(Path(home).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = spec_from_file_location(Path(home).stem, home)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
