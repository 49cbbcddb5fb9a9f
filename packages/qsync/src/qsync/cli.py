"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cli import DemoOptions, JsonOption, run_command

if TYPE_CHECKING:
    from qsync.profiler.indicator import OperatorNoise
    from qsync.profiler.profile import RankProfile

__all__ = ["main"]

_ABOUT = """Train on unequal devices together, giving up the least precision.

Which operators of a training step must stay in float32 on this device, and which need not:
  qsync plan --build train:build --target-time 0.8x

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobOptions(JsonOption):
    build: str
    """module:function or file.py:function, which returns model, batches and a loss function of
    (model, batch)."""
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8")
    """Precisions that operators may have, of fp8, int8, bf16, fp16 and fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(_JobOptions):
    """Choose the precision of each operator and write the plan.

    Under torchrun every rank is measured: slow ranks lower what they need to, so that nobody waits for them.

    Examples:
        qsync plan --build train:build --target-time 0.8x
        torchrun --nproc-per-node 2 -m qsync plan --build train:build --out plan.json
    """

    target_time: str | None = None
    """Longest step without the optimizer: 0.8x of float32's, or seconds. By default ranks get as fast as
    the fastest one is in float32; one rank gets as fast as it can."""
    memory: str | None = None
    """Memory of each rank, such as 8GiB; the device's by default."""
    out: Path = Path("report/qsync/plan.json")
    """Where the plan is written."""

    def execute(self) -> None:
        """Measures, plans, explains, and writes the plan."""
        from qsync import plan
        from qsync.config import build_job
        from shared.comms.init import joined
        from shared.training.progress import show_progress

        with joined() as group:
            job = build_job(self.build)
            is_first = group.rank == 0
            with show_progress("measuring", is_shown=is_first):
                chosen = plan(
                    *job,
                    precisions=self.precisions,
                    target_time=self.target_time,
                    memory=self.memory,
                )
            if is_first:
                self.out.parent.mkdir(parents=True, exist_ok=True)
                chosen.save(self.out)
                record = {
                    "plan": str(self.out),
                    "step_s": chosen.step_s,
                    "float32_s": chosen.float32_s,
                    "target_s": chosen.target_s,
                    "is_target_met": chosen.is_target_met,
                    "noise": [rank.noise for rank in chosen.ranks],
                    "lowered": [dict(rank.lowered) for rank in chosen.ranks],
                }
                self.print_result(record, f"{chosen.explain()}\nwritten to {self.out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel(_JobOptions):
    """Measure each operator's forward and backward pass in each precision.

    Examples:
        qsync profile --build train:build
        qsync profile --build train:build --precisions fp32 bf16 --json
    """

    def execute(self) -> None:
        """Prints a row for each operator."""
        from itertools import islice

        from qsync.config import build_job
        from qsync.profiler.indicator import NUM_BATCHES
        from qsync.profiler.profile import profile_model
        from shared.training.progress import show_progress

        model, batches, loss_fn = build_job(self.build)
        with show_progress("measuring"):
            profile = profile_model(
                model, list(islice(batches, NUM_BATCHES)), loss_fn, precisions=self.precisions
            )
        record = {
            "device": profile.device,
            "step_s": profile.step_s,
            "forward_s": {name: dict(row) for name, row in profile.forward_s.items()},
            "backward_s": {name: dict(row) for name, row in profile.backward_s.items()},
            "casts": {
                f"{source} to {target}": [fit.alpha_s, fit.beta_s_per_byte]
                for (source, target), fit in profile.casts.items()
            },
        }
        self.print_result(record, _describe_profile(profile))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSensitivity(_JobOptions):
    """Estimate how much lowering each operator disturbs the gradient.

    Examples:
        qsync sensitivity --build train:build
    """

    def execute(self) -> None:
        """Prints a row for each operator, the most sensitive one first."""
        from qsync import sensitivity
        from qsync.config import build_job
        from shared.training.progress import show_progress

        with show_progress("measuring"):
            measured = sensitivity(*build_job(self.build), precisions=self.precisions)
        record = {"method": measured.method, "reason": measured.reason, "noise": measured.noise}
        self.print_result(record, _describe_noise(measured))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Sum ranges by prefix sums and one by one, on this machine.

    Examples:
        qsync demo --out report/qsync
        qsync demo --full
    """

    out: Path = Path("report/qsync")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more repeats."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from qsync import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    return run_command(
        {
            "plan": MakePlan,
            "profile": ProfileModel,
            "sensitivity": MeasureSensitivity,
            "demo": Demo,
        },
        prog="qsync",
        about=_ABOUT,
        argv=argv,
    )


def _describe_profile(profile: RankProfile) -> str:
    from shared.units import format_s

    names = [profile.graph.ops[i].name for i in profile.graph.linears]
    precisions = list(profile.forward_s[names[0]])
    rows = [
        [
            name,
            *(
                format_s(profile.forward_s[name][each] + profile.backward_s[name][each])
                for each in precisions
            ),
        ]
        for name in names
    ]
    head = f"{profile.device}: a float32 step takes {format_s(profile.step_s)}"
    return "\n".join([head, *profile.notes, _draw(["operator", *precisions], rows)])


def _describe_noise(measured: OperatorNoise) -> str:
    precisions = list(next(iter(measured.noise.values())))
    # The lowest precision comes first.
    order = sorted(measured.noise, key=lambda name: -measured.noise[name][precisions[0]])
    rows = [[name, *(f"{measured.noise[name][each]:.3g}" for each in precisions)] for name in order]
    reason = f" ({measured.reason})" if measured.reason else ""
    head = f"squared relative error of the gradient, by {measured.method}{reason}"
    return f"{head}\n{_draw(['operator', *precisions], rows)}"


def _draw(heads: list[str], rows: list[list[Any]]) -> str:
    from rich.table import Table

    from shared.cli import draw_table

    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    return draw_table(table)
