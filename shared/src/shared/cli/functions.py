"""Functions of users that a command line names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

__all__ = ["load_function"]


def load_function(text: str, option: str, returns: str) -> Callable[..., Any]:
    """Imports a function by its name.

    Args:
        text: "module:function", looked up in the working folder too, or "file.py:function", whose
            imports may lie beside it.
        option: name of the option, for errors.
        returns: what the function returns, for errors: "a model and its batches".

    Raises:
        ConfigError: there is no such function.
    """
    home, _, name = text.rpartition(":")
    try:
        function = getattr(_import(home), name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ConfigError(
            f"{option}: expected module:function or file.py:function that returns {returns}, got "
            f"{text!r} ({error}); check both names"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{option}: expected a function that returns {returns}, got {text!r}, a "
            f"{type(function).__name__}; name the function"
        )
    return function


def _import(home: str) -> Any:
    if not home.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return import_module(home)
    folder = str(Path(home).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = spec_from_file_location(Path(home).stem, home)
    assert spec is not None, "the file's name ends with .py"
    assert spec.loader is not None, "it is no folder"
    # Entered, so that pickles of what the file defines can be read.
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
