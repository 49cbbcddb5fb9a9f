"""Command lines: what all packages' have in common (`commands`), and how they start (`entry_point`).

Names are imported lazily, so that a program can prepare for Ctrl-C before it imports them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.cli.commands import (
        CheckpointOption,
        Choice,
        Command,
        DemoOptions,
        JsonOption,
        choice,
        draw_table,
        read_examples,
        run_command,
    )

__all__ = [
    "CheckpointOption",
    "Choice",
    "Command",
    "DemoOptions",
    "JsonOption",
    "choice",
    "draw_table",
    "read_examples",
    "run_command",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("shared.cli.commands"), name)
