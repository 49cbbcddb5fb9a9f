"""Subcommands about logs and failures: plan-logs, verify-log and simulate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from shared.cli import JsonOption
from shared.errors import ConfigError, DataError
from shared.units import format_bytes, format_s, parse_bytes

__all__ = ["PlanLogs", "Simulate", "VerifyLog"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLogs(JsonOption):
    """Choose the boundaries of a pipeline that are logged, within a budget of disk.

    The profile is what swift.profiler.measure writes; `logged` of the result is BoundaryLog's.

    Examples:
        meshyard-swift plan-logs profile.json --budget 200GB
        meshyard-swift plan-logs profile.json --budget 2GB --method greedy
    """

    profile: tyro.conf.Positional[Path]
    """JSON of a measured pipeline."""
    budget: str
    """Bytes of all stages' logs between two checkpoints, such as 200GB."""
    interval: int = 100
    """Steps between checkpoints."""
    method: Literal["exact", "greedy"] = "exact"
    """The best choice, or the published heuristic's."""

    def __post_init__(self) -> None:
        parse_bytes(self.budget)
        if self.interval < 1:
            raise ConfigError(f"--interval: expected at least 1 step, got {self.interval}")

    def execute(self) -> None:
        """Prints the choice and what it costs."""
        from swift.pipeline.profile import Profile
        from swift.pipeline.selection import select_logs

        profile = Profile.load(self.profile)
        found = select_logs(
            profile.replay_s,
            profile.boundary_bytes,
            self.interval,
            profile.bytes_per_s,
            parse_bytes(self.budget),
            self.method,
        )
        record = {
            "logged": found.logged,
            "expected_replay_s": found.expected_replay_s,
            "log_bytes": found.log_bytes,
            "interval": self.interval,
        }
        marks = "".join("|" if is_logged else "-" for is_logged in found.logged)
        stages = "".join(f"{at}{mark}" for at, mark in enumerate([*marks, ""]))
        text = (
            f"stages {stages}   (| logged, - not)\n"
            f"a lost stage replays a step in {format_s(found.expected_replay_s)} on average, an undisturbed "
            f"step takes {format_s(profile.step_s)}\n"
            f"{format_bytes(found.log_bytes)} of logs in {self.interval} steps"
        )
        self.print_result(record, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyLog(JsonOption):
    """Read logs of boundary messages, and say what is missing or damaged. Status 1 if anything is.

    Examples:
        meshyard-swift verify-log /local/log
        meshyard-swift verify-log /local/log --json
    """

    folder: tyro.conf.Positional[Path]
    """Folder of a BoundaryLog, or of one stage in it."""
    run: str | None = None
    """Id of the run whose messages are expected; by default that of each stage's newest file."""

    def execute(self) -> int:
        """Prints a line a file and a line a fault."""
        if not self.folder.is_dir():
            raise DataError(
                f"{self.folder}: expected a folder of logs, got none; give that of swift.BoundaryLog"
            )
        from swift.pipeline.chunks import verify_logs  # torch takes seconds

        chunks = verify_logs(self.folder, self.run)
        lines, records = [], []
        for chunk in chunks:
            iterations = sorted({key.iteration for key in chunk.records})
            span = f"steps {iterations[0]} to {iterations[-1]}" if iterations else "no step"
            state = "whole" if chunk.is_closed else f"not closed, {chunk.torn_bytes} bytes torn off"
            lines.append(
                f"{chunk.path}: stage {chunk.header.stage}, run {chunk.header.run}, {span}, "
                f"{chunk.num_records} records, {format_bytes(chunk.end)}, {state}"
            )
            lines += [f"  damaged: {text}" for text in chunk.damage]
            records.append(
                {
                    "path": str(chunk.path),
                    "stage": chunk.header.stage,
                    "run": chunk.header.run,
                    "first_step": iterations[0] if iterations else None,
                    "last_step": iterations[-1] if iterations else None,
                    "num_records": chunk.num_records,
                    "is_closed": chunk.is_closed,
                    "torn_bytes": chunk.torn_bytes,
                    "damage": chunk.damage,
                }
            )
        self.print_result({"files": records}, "\n".join(lines))
        return int(any(chunk.damage for chunk in chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(JsonOption):
    """Simulate a training on machines that fail: replicas, replay and checkpoints side by side.

    Nothing is run. The intervals of checkpoints are Young's and Daly's for each way.

    Examples:
        meshyard-swift simulate
        meshyard-swift simulate --steps 100000 --step 2 --machines 128 --mtbf 100 1000
    """

    steps: int = 10_000
    """Steps of the training."""
    step: float = 1.0
    """Seconds of a step."""
    checkpoint: float = 10.0
    """Seconds for which a checkpoint stops training."""
    machines: int = 128
    """Machines, each of which fails by itself."""
    mtbf: tuple[float, ...] = (100.0, 1000.0, 10_000.0)
    """Hours between failures of one machine."""
    outage: float = 0.4
    """Seconds until a lost rank is refilled from its replica, or begins to replay."""
    replay: float = 8 / 11
    """Seconds in which a second of training is replayed: M / (M + P - 1) of M micro-batches, P stages."""
    restart: float = 60.0
    """Seconds until all ranks have started again, and read a checkpoint."""
    seeds: int = 5
    """Random sequences of failures; medians are shown."""

    def __post_init__(self) -> None:
        from swift.simulator import Recovery, Training

        Training(num_steps=self.steps, step_s=self.step, checkpoint_s=self.checkpoint)
        for outage_s in (self.outage, self.restart):
            Recovery(outage_s=outage_s, repeat_step_s=self.replay * self.step)
        if self.machines < 1 or self.seeds < 1 or not all(hours > 0 for hours in self.mtbf):
            raise ConfigError(
                f"expected --machines and --seeds of at least 1 and --mtbf above 0, got {self.machines}, "
                f"{self.seeds} and {self.mtbf}"
            )

    def execute(self) -> None:
        """Prints a row for each way and rate of failures."""
        from statistics import median

        from swift.simulator import Recovery, Training, compare

        training = Training(num_steps=self.steps, step_s=self.step, checkpoint_s=self.checkpoint)
        ways = {
            "replica": Recovery(outage_s=self.outage),
            "replay": Recovery(outage_s=self.outage, repeat_step_s=self.replay * self.step),
            "checkpoint": Recovery(outage_s=self.restart, repeat_step_s=self.step),
        }
        ideal_s = self.steps * self.step
        rows = []
        lines = [
            f"simulated: {self.machines} machines, {self.steps:,} steps of {self.step:g} s",
            f"{'MTBF h':>8}  {'way':<10}  {'interval':>8}  {'failures':>8}  {'of ideal time':>13}",
        ]
        for hours in self.mtbf:
            found = compare(training, ways, 3600 * hours, self.machines, range(self.seeds))
            for name, (interval, runs) in found.items():
                total_s = median(run.total_s for run in runs)
                failures = median(run.num_failures for run in runs)
                rows.append(
                    {
                        "mtbf_h": hours,
                        "way": name,
                        "interval": interval,
                        "failures": failures,
                        "total_s": total_s,
                        "is_simulated": True,
                    }
                )
                shown = "-" if interval is None else str(interval)
                lines.append(
                    f"{hours:>8g}  {name:<10}  {shown:>8}  {failures:>8g}  {total_s / ideal_s:>12.3f}x"
                )
        self.print_result({"rows": rows}, "\n".join(lines))
