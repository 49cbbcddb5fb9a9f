"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from collections.abc import Callable

from shared.cli import Command, run_command

__all__ = ["main"]

_ABOUT = """Train on: a lost rank costs a fraction of a second, and not one bit of the result.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands: dict[str, Callable[..., Command]] = {}
    return run_command(commands, prog="meshyard-swift", about=_ABOUT, argv=argv)
