"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shared.cli import DemoOptions, JsonOption, run_command
from shared.errors import ConfigError

__all__ = ["main"]

_ABOUT = """Train on unequal devices together, giving up the least precision.

Which operators of a training step must stay in float32 on this device, and which need not:
  qsync plan --build packages/qsync/examples/lower_one_device.py:build --target-time 0.8x
Who waits for whom in a job of several ranks, and why:
  qsync diagnose report/traces/rank0.json.gz report/traces/rank1.json.gz --advise

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
        qsync plan --build packages/qsync/examples/lower_one_device.py:build --target-time 0.8x
        torchrun --nproc-per-node 2 -m qsync plan --build packages/qsync/examples/lower_one_device.py:build
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
        qsync profile --build packages/qsync/examples/lower_one_device.py:build
        qsync profile --build packages/qsync/examples/lower_one_device.py:build --precisions fp32 bf16 --json
    """

    def execute(self) -> None:
        """Prints a row for each operator."""
        from itertools import islice

        from qsync.config import build_job
        from qsync.profiler.indicator import NUM_BATCHES
        from qsync.profiler.profile import profile_model
        from qsync.report import describe_profile
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
        self.print_result(record, describe_profile(profile))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSensitivity(_JobOptions):
    """Estimate how much lowering each operator disturbs the gradient.

    Examples:
        qsync sensitivity --build packages/qsync/examples/lower_one_device.py:build
        qsync sensitivity --build packages/qsync/examples/lower_one_device.py:build --precisions bf16 int8 --json
    """

    def execute(self) -> None:
        """Prints a row for each operator, the most sensitive one first."""
        from qsync import sensitivity
        from qsync.config import build_job
        from qsync.report import describe_noise
        from shared.training.progress import show_progress

        with show_progress("measuring"):
            measured = sensitivity(*build_job(self.build), precisions=self.precisions)
        record = {"method": measured.method, "reason": measured.reason, "noise": measured.noise}
        self.print_result(record, describe_noise(measured))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceOptions(JsonOption):
    traces: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Traces that torch.profiler exported, one of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseTraces(_TraceOptions):
    """Say who waits for whom and why, from torch.profiler traces of any DDP job.

    Examples:
        qsync diagnose report/traces/rank0.json.gz report/traces/rank1.json.gz
        qsync diagnose report/traces/rank0.json.gz report/traces/rank1.json.gz --advise
    """

    advise: bool = False
    """Also rank changes by their predicted gain."""
    memory: str | None = None
    """Memory of each device, such as 8GiB, to which advised changes bring the job; needs traces with
    memory (profile_memory=True)."""

    def execute(self) -> None:
        """Prints the diagnosis."""
        from qsync import diagnose
        from qsync.diagnosis.advise import advise
        from qsync.report import describe_advice
        from shared.units import parse_bytes

        diagnosis = diagnose(self.traces)
        record = {
            "step_s": diagnosis.step_s,
            "replayed_step_s": diagnosis.replayed_step_s,
            "slowest_rank": diagnosis.slowest_rank,
            "wait_s": diagnosis.wait_s,
            "transfer_s": diagnosis.transfer_s,
            "clock_offset_s": diagnosis.clock_offset_s,
            "causes": [cause._asdict() for cause in diagnosis.causes],
        }
        text = diagnosis.explain()
        if self.advise or self.memory is not None:
            limit = None if self.memory is None else parse_bytes(self.memory)
            advices = advise(diagnosis, memory_limit_bytes=limit)
            keys = ("strategy", "text", "step_s", "gain", "saved_bytes")
            record["advice"] = [{key: getattr(each, key) for key in keys} for each in advices]
            text += f"\n{describe_advice(advices)}"
        self.print_result(record, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTraces(_TraceOptions):
    """Predict a traced job's step under changes that nobody has made yet.

    Examples:
        qsync replay report/traces/rank0.json.gz report/traces/rank1.json.gz --link-speed 2
        qsync replay report/traces/rank0.json.gz report/traces/rank1.json.gz --rank-speed 1=1.5
    """

    link_speed: float = 1.0
    """Factor on the rate of the links."""
    rank_speed: tuple[str, ...] = ()
    """Factors on all that a rank does, as 1=1.5."""
    operator_speed: tuple[str, ...] = ()
    """Factors on an operator on all ranks, as aten::linear=2."""
    gradient_share: float = 1.0
    """Bytes of gradients as a share of the present ones: 0.5 for bf16."""
    bucket: str | None = None
    """Size of DDP's buckets, such as 5MiB."""
    accumulation: int = 1
    """Micro-batches whose gradients are added up before they are all-reduced."""
    out: Path | None = None
    """Chrome trace to write: the measured steps beside the replayed ones."""

    def execute(self) -> None:
        """Prints the step as traced, replayed, and changed."""
        from qsync import diagnose
        from qsync.diagnosis.chrome import write_comparison
        from qsync.diagnosis.what_if import JobChange
        from shared.units import format_s, parse_bytes

        change = JobChange(
            link_speed=self.link_speed,
            rank_speed={int(r): f for r, f in _read_factors("rank_speed", self.rank_speed, r"\d+")},
            operator_speed={
                (None, name): factor
                for name, factor in _read_factors("operator_speed", self.operator_speed, r".+")
            },
            gradient_share=self.gradient_share,
            bucket_bytes=None if self.bucket is None else parse_bytes(self.bucket),
            accumulation=self.accumulation,
        )
        diagnosis = diagnose(self.traces)
        forecast = diagnosis.job.predict(change)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_comparison(diagnosis, self.out, change)
        record = {
            "measured_s": diagnosis.step_s,
            "replayed_s": diagnosis.replayed_step_s,
            "changed_s": forecast.step_s,
        }
        text = (
            f"measured {format_s(diagnosis.step_s)} a step, replayed "
            f"{format_s(diagnosis.replayed_step_s)}; with the changes {format_s(forecast.step_s)}, "
            f"{diagnosis.replayed_step_s / forecast.step_s:.2f} times as fast"
            f"{forecast.note and f' ({forecast.note})'}"
        )
        self.print_result(record, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train MiniLM on two unlike ranks, in float32 and by a plan in turns, on this machine.

    Examples:
        qsync demo --out report/qsync
        qsync demo --full
    """

    out: Path = Path("report/qsync")
    """Folder for demo.json, the plan and a picture."""
    full: bool = False
    """The long form: more tokens, all layers, int8 too."""

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
            "replay": ReplayTraces,
            "diagnose": DiagnoseTraces,
            "demo": Demo,
        },
        prog="qsync",
        about=_ABOUT,
        argv=argv,
    )


def _read_factors(option: str, pairs: tuple[str, ...], key: str) -> Iterator[tuple[str, float]]:
    for pair in pairs:
        match = re.fullmatch(rf"({key})=(\d+\.?\d*)", pair)
        if match is None:
            raise ConfigError(f"{option}: expected a name and its factor, as 1=1.5, got {pair!r}")
        yield match[1], float(match[2])
