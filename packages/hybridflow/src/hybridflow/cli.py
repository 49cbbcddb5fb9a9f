"""The command line. Nothing heavy is imported before a subcommand runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shared.errors import MeshyardError

__all__ = ["main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Does the main job on this machine beside a baseline, and writes demo.json and a picture."""

    out: Path = Path("report/hybridflow")
    """Folder for the files."""
    full: bool = False
    """The long form: more repeats."""

    def run(self) -> None:
        """Runs the demo and prints its claims."""
        from hybridflow.demo import run_demo

        for claim in run_demo(self.out, repeats=25 if self.full else 5):
            print(f"{claim.name}: {claim.ratio:.1f}x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Sums one range of the whole numbers 0, 1, 2, ..."""

    start: int
    """First number."""
    stop: int
    """The number after the last."""

    def run(self) -> None:
        """Prints the sum."""
        import numpy as np

        from hybridflow.sums import range_sums

        bounds = np.array([[self.start], [self.stop]])
        print(int(range_sums(np.arange(max(self.stop, 0)), bounds[0], bounds[1])[0]))


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")] | Annotated[Sum, tyro.conf.subcommand("sum")]
)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    command: Demo | Sum = tyro.cli(Command, prog="hybridflow", args=argv)  # type: ignore[arg-type]
    try:
        command.run()
    except MeshyardError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return 1
    return 0
