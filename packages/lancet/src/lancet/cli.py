"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shared.cli import DemoOptions, JsonOption, draw_table, run_command

__all__ = ["main"]

_ABOUT = """Hide the all-to-alls of a Mixture-of-Experts model under its training step.

What a step of your model exposes on these ranks, and what an order by costs hides:
  torchrun --nproc-per-node 2 -m lancet profile --build packages/lancet/examples/train_text.py:build
Why some of it is left, and what a faster or slower network would change:
  lancet explain report/lancet/plan.json
  lancet simulate report/lancet/plan.json --communication 0.25 0.5 1 2

Exit status: 0 done; 1 failed; 2 wrong usage.
"""
_PLAN = Path("report/lancet/plan.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStep(JsonOption):
    """Capture a step of a model, time its operations, plan, and write the plan.

    Examples:
        torchrun --nproc-per-node 2 -m lancet profile --build packages/lancet/examples/train_text.py:build
        torchrun --nproc-per-node 4 -m lancet profile --build job:build --out report/lancet/four.json
    """

    build: str
    """module:function or file.py:function, which returns a model and a batch, a dictionary of the
    model's arguments with labels."""
    out: Path = _PLAN
    """Where the plan is written."""

    def execute(self) -> None:
        """Runs a step, prints the report and writes the plan."""
        import torch

        import lancet
        from lancet.config import build_job
        from shared.comms.init import joined
        from shared.training.progress import show_progress

        with joined() as group:
            model, batch = build_job(self.build)
            lancet.parallelize(model, group)
            backend = lancet.Backend(group, partition=None)
            step = torch.compile(model, backend=backend, fullgraph=True)
            with show_progress("capturing a step", is_shown=group.rank == 0):
                step(**batch).loss.backward()
            if group.rank == 0:
                self.out.parent.mkdir(parents=True, exist_ok=True)
                backend.save_plan(self.out)
                report = backend.report()
                record = {"plan": str(self.out), "sentences": list(report.sentences)}
                self.print_result(record, f"{report}\nwritten to {self.out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOrders(JsonOption):
    """Run a step in captured and in planned order, in turns, on these ranks.

    Examples:
        torchrun --nproc-per-node 2 -m lancet bench --build packages/lancet/examples/train_text.py:build
        torchrun --nproc-per-node 2 -m lancet bench --build job:build --num-turns 21
    """

    build: str
    """As for profile."""
    num_turns: int = 7
    """Timed steps of each order."""

    def execute(self) -> None:
        """Times both orders and prints medians and ranges."""
        from itertools import repeat

        import lancet
        from lancet.config import build_job
        from lancet.runtime.comparison import ORDERS, compare_orders
        from shared.comms.init import joined
        from shared.training.progress import show_progress

        with joined() as group:
            model, batch = build_job(self.build)
            lancet.parallelize(model, group)
            backend = lancet.Backend(group, partition=None)
            with show_progress("running both orders", is_shown=group.rank == 0):
                record = compare_orders(model, group, backend, repeat(batch), self.num_turns)
            if group.rank == 0:
                rows = [
                    [order, *_spread(record.step_s[order]), *_spread(record.waits_s[order])[:1]]
                    for order in ORDERS
                ]
                columns = ["order", "step", "fastest", "slowest", "waits of rank 0"]
                text = f"{_draw(columns, rows)}\n{backend.report()}"
                self.print_result(
                    {"step_s": record.step_s, "waits_s": record.waits_s,
                     "is_equal": all(record.equal)}, text,
                )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile(JsonOption):
    plan: Annotated[Path, tyro.conf.Positional] = _PLAN
    """What `lancet profile` or Backend.save_plan wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(_PlanFile):
    """Plan again from a plan's operations, for a network of another speed.

    Examples:
        lancet plan report/lancet/plan.json --network 2
        lancet plan report/lancet/plan.json --network 0.5 --out report/lancet/slower.json
    """

    network: float = 1.0
    """How many times faster collectives are than they were measured."""
    out: Path = Path("report/lancet/replanned.json")
    """Where the new plan is written."""

    def execute(self) -> None:
        """Plans, explains and writes the plan."""
        from lancet.planner.plan import load_plans, replan, save_plans
        from lancet.report import explain

        plans = [replan(plan, self.network) for plan in load_plans(self.plan)]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        save_plans(self.out, plans)
        lines = [line for plan in plans for line in explain(plan)]
        record = {"plan": str(self.out), "makespan_s": [plan.makespan_s for plan in plans]}
        self.print_result(record, "\n".join([*lines, f"written to {self.out}"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainPlan(_PlanFile):
    """Say what covers each collective, and why some of it is left.

    Examples:
        lancet explain report/lancet/plan.json
        lancet explain report/lancet/plan.json --json
    """

    def execute(self) -> None:
        """Prints the plan's lines."""
        from lancet.planner.plan import load_plans
        from lancet.report import explain

        plans = load_plans(self.plan)
        lines = [line for plan in plans for line in explain(plan)]
        names = ("graph", "before_s", "makespan_s", "exposed_before_s", "exposed_s")
        record = {"plans": [{name: getattr(plan, name) for name in names} for plan in plans]}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateNetworks(_PlanFile):
    """Replay a plan's operations with communication of other lengths.

    Examples:
        lancet simulate report/lancet/plan.json --communication 0.25 0.5 1 2
        lancet simulate report/lancet/plan.json --communication 0.1 --json
    """

    communication: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Seconds of all collectives over those of all computing."""

    def execute(self) -> None:
        """Prints a table of replayed seconds."""
        from lancet.planner.networks import sweep_communication
        from lancet.planner.plan import load_plans
        from shared.units import format_s

        rows, records = [], []
        for plan in load_plans(self.plan):
            for point in sweep_communication(plan.ops, self.communication):
                records.append({"graph": plan.graph, **asdict(point)})
                rows.append(
                    [plan.graph, f"{point.communication:g}", format_s(point.before_s),
                     format_s(point.makespan_s), format_s(point.exposed_before_s),
                     format_s(point.exposed_s)]
                )  # fmt: skip
        columns = ["graph", "communication", "captured", "planned", "exposed, captured", "planned"]
        self.print_result({"points": records}, _draw(columns, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train a small Qwen3-MoE on two hosts, in captured and in planned order, in turns.

    Examples:
        lancet demo --out report/lancet
        lancet demo --full
    """

    out: Path = Path("report/lancet")
    """Folder for demo.json, the report, a trace and a picture."""
    full: bool = False
    """The long form: more layers, wider experts, more turns."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from lancet import demo

        return self.run_demo(demo.run)


def _draw(columns: list[str], rows: list[list[str]]) -> str:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return draw_table(table)


def _spread(seconds: list[float]) -> list[str]:
    from statistics import median

    from shared.units import format_s

    return [format_s(value) for value in (median(seconds), min(seconds), max(seconds))]


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {
        "profile": ProfileStep, "plan": MakePlan, "explain": ExplainPlan,
        "simulate": SimulateNetworks, "bench": CompareOrders, "demo": Demo,
    }  # fmt: skip
    return run_command(commands, prog="lancet", about=_ABOUT, argv=argv)
