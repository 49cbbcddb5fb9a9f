"""What commands are given: a job with its batches, named on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shared.cli.functions import load_function
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
    result = load_function(text, "build", "a job and its batches")()
    if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[0], "components"):
        raise ConfigError(
            f"build: expected {text} to return a diffusionpipe.Job and batches, got "
            f"{type(result).__name__}; return these two"
        )
    return result
