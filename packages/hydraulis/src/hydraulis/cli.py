"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from shared.cli import JsonOption, run_command

__all__ = ["main"]

_ABOUT = """Documents of any length, every rank finishing at the same time: the planner.

Start with: hydraulis plan lengths.txt --ranks 64 --cap 8192

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroups(JsonOption):
    """Plan groups of ranks for one step's documents: long ones on several ranks, short ones on one.

    Example: hydraulis plan lengths.txt --ranks 64 --cap 8192 --a 5.1e-9 --b 1.8e-4 --c 0.6
    """

    lengths: tyro.conf.Positional[Path]
    """Text file, a document's tokens on each line."""
    ranks: int
    """Ranks in all."""
    cap: int
    """Most tokens that a rank holds."""
    a: float = 5.128e-9
    """Seconds for each token squared; the defaults are FlexSP's for a model of 7 billion weights."""
    b: float = 1.8396e-4
    """Seconds for each token."""
    c: float = 0.629
    """Seconds of any micro-batch."""
    message: float = 0.0
    """Seconds of messages for each token in groups of several ranks."""

    def execute(self) -> None:
        """Prints the groups, the step's seconds and how far from the best they can be."""
        import numpy as np

        from hydraulis.config import Cost
        from hydraulis.data import read_lengths
        from hydraulis.planner.degrees import DegreeCost, plan_degrees

        lengths = read_lengths(self.lengths)
        degrees = {2**power: self.message for power in range(1, 32)}
        cost = DegreeCost(cost=Cost(a=self.a, b=self.b, c=self.c), cap=self.cap, message_s=degrees)
        plan = plan_degrees(lengths, self.ranks, cost)
        seconds = plan.seconds(lengths, cost)
        lines = [f"{'ranks':>6}  {'groups':>6}  {'documents':>9}  {'longest':>8}"]
        groups = []
        for degree in np.unique(plan.degree_of)[::-1].tolist():
            mine = np.isin(plan.group_of, np.flatnonzero(plan.degree_of == degree))
            row = {
                "ranks": degree,
                "groups": int((plan.degree_of == degree).sum()),
                "documents": int(mine.sum()),
                "longest": int(lengths[mine].max(initial=0)),
            }
            groups.append(row)
            lines.append(
                f"{degree:>6}  {row['groups']:>6}  {row['documents']:>9}  {row['longest']:>8}"
            )
        busy = float((seconds * plan.degree_of).sum() / (self.ranks * plan.makespan_s))
        lines.append(f"{plan.makespan_s:.4g} s for the step, ranks idle {1 - busy:.1%} of it")
        lines.append(f"no plan of this kind is faster by more than {plan.gap:.2%}")
        record = {"seconds": plan.makespan_s, "bound_s": plan.bound_s, "groups": groups}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Balance Python's own source files over ranks, beside published ways.

    Example: hydraulis demo --out report/hydraulis
    """

    out: Path = Path("report/hydraulis")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more repeats."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from hydraulis import demo

        return int(not demo.run(self.out, is_full=self.full))


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {"plan": PlanGroups, "demo": Demo}
    return run_command(commands, prog="hydraulis", about=_ABOUT, argv=argv)
