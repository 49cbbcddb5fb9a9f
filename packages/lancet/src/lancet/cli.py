"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lancet.summing.registry import METHODS
from shared.cli import DemoOptions, JsonOption, choice, run_command

__all__ = ["main"]

_ABOUT = """Sum many ranges of one array.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(JsonOption):
    """Sum one range of the whole numbers 0, 1, 2, ...

    Examples:
        lancet sum --start 2 --stop 5
        lancet sum --start 2 --stop 5 --method loop
    """

    start: int
    """First number."""
    stop: int
    """The number after the last."""
    method: Annotated[str, choice(METHODS)] = "prefix"
    """How the range is summed; the sum is the same."""

    def execute(self) -> None:
        """Prints the sum."""
        import numpy as np

        from lancet.summing.ranges import range_sums

        starts, stops = np.array([self.start]), np.array([self.stop])
        values = np.arange(max(self.stop, 0))
        found = int(range_sums(values, starts, stops, method=self.method)[0])
        self.print_result({"sum": found, "method": self.method}, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Sum ranges by prefix sums and one by one, on this machine.

    Examples:
        lancet demo --out report/lancet
        lancet demo --full
    """

    out: Path = Path("report/lancet")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more repeats."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from lancet import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    return run_command({"sum": Sum, "demo": Demo}, prog="lancet", about=_ABOUT, argv=argv)
