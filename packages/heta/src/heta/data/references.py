"""Functions of the user's that the command line names: "file.py:function" or "module:function"."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

__all__ = ["check_reference", "load_reference"]


def check_reference(text: str, key: str) -> None:
    """Refuses a reference whose file or module is missing, without importing it.

    Args:
        text: the reference.
        key: the option, for messages.

    Raises:
        ConfigError: it is no reference, or names no file or module.
    """
    home, _, name = text.rpartition(":")
    if not home or not name.isidentifier():
        raise ConfigError(f"{key}: expected file.py:function or module:function, got {text!r}")
    if home.endswith(".py"):
        exists = Path(home).is_file()
    else:
        _search_working_folder()
        try:
            exists = importlib.util.find_spec(home) is not None
        except (ImportError, ValueError):
            exists = False
    if not exists:
        raise ConfigError(
            f"{key}: expected file.py:function or module:function, got {text!r}, and there is no "
            f"{'file' if home.endswith('.py') else 'module'} {home}; check the path"
        )


def load_reference(text: str, key: str) -> Callable[..., Any]:
    """Imports the function of a reference.

    Args:
        text: the reference.
        key: the option, for messages.

    Raises:
        ConfigError: there is no such file, module or function, or importing it fails.
    """
    check_reference(text, key)
    home, _, name = text.rpartition(":")
    try:
        module = _import_file(Path(home)) if home.endswith(".py") else import_module(home)
    except ImportError as error:
        raise ConfigError(f"{key}: {home} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{key}: expected {home} to have a function {name!r}, got "
            f"{'none' if function is None else f'a {type(function).__name__}'}"
        )
    return function


def _search_working_folder() -> None:
    """Lets modules of the working folder be imported, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file's name ends with .py"
    assert spec.loader is not None, "it is no folder"
    module = importlib.util.module_from_spec(spec)
    # So that the file's own imports work, and pickles of what it defines.
    sys.modules[spec.name] = module
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
