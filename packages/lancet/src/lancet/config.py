"""What commands are given: a model and a batch, named on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.cli.functions import load_function
from shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_job"]

_RETURNS = "a model and a batch"


def build_job(text: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """Calls a function that builds a model and a batch.

    Args:
        text: "module:function", looked up in the working folder too, or "file.py:function".

    Returns:
        The model, and the arguments of its call, labels among them.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    result = load_function(text, "build", _RETURNS)()
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise ConfigError(
            f"build: expected {text} to return a model and a batch, a dictionary of the model's "
            f"arguments, got {type(result).__name__}; return these two"
        )
    return result
