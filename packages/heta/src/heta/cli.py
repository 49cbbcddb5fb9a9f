"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.cli import DemoOptions, run_command

__all__ = ["main"]

_ABOUT = "Train heterogeneous graph networks across hosts, sending one row a seed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train flights on two ranks by each strategy, and compare losses, bytes and seconds.

    Examples:
        heta demo --out report/heta
        heta demo --full
    """

    out: Path = Path("report/heta")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: the whole year and more steps."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from heta import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    return run_command({"demo": Demo}, prog="heta", about=_ABOUT, argv=argv)
