"""Every recorded run of every claim: bench/results/history.jsonl, one line a claim and run.

Lines are only ever appended. A claim is the same one from run to run as long as its package, its
benchmark, its name and the name of its baseline stay; what a run chose or measured belongs into the
detail. Where the run itself picks its baseline, as the fastest of several peers, the pick follows a
colon, "the fastest peer that fits: every 4 layers", and tells no claims apart. All runs of a claim count until its benchmark raises its `REVISION`: then only runs of the
highest revision on record do, for all claims of that benchmark, and the earlier ones stay in the
file.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

__all__ = [
    "ClaimRun",
    "Series",
    "append_history",
    "current_series",
    "format_number",
    "read_history",
    "without_pick",
]

# Baselines that their first runs named by the pick alone, by package and benchmark.
_RENAMED = {
    ("swift", "step"): {
        "DDP": "the faster DDP: buckets of 25 MB",
        "DDP, 8 MB": "the faster DDP: buckets of 8 MB",
    },
    ("memo", "training"): {
        f"the best fixed fraction, {at}/8": f"the best fixed fraction: {at}/8" for at in range(9)
    },
    ("llmpq", "matmul"): {"dense16, the best other form": "the best other form: dense16"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRun:
    """A claim as one run found it: the fields of `shared.claims.Claim`, and what ran where.

    `ratio` is None when it was not finite, and so are `ours` and `baseline`; `spread` is the lowest
    and the highest ratio within the run, where the benchmark gives them; `aim` is the ratio aimed
    at; `date` is UTC in ISO form with minutes, so that dates sort as texts; `versions` are by distribution.
    """

    package: str
    benchmark: str
    revision: int
    name: str
    unit: str
    ours: float | None
    baseline: float | None
    baseline_name: str
    higher_is_better: bool
    ratio: float | None
    spread: tuple[float, float] | None
    correct: bool
    kind: str
    aim: float | None
    detail: str
    source: str
    command: str
    commit: str
    date: str
    machine: str
    versions: dict[str, str]

    @property
    def is_aim_met(self) -> bool:
        """Whether the ratio reaches the aim."""
        return self.aim is not None and self.ratio is not None and self.ratio >= self.aim


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one claim that count, oldest first; at least one."""

    runs: tuple[ClaimRun, ...]

    @property
    def newest(self) -> ClaimRun:
        """The run that was recorded last."""
        return self.runs[-1]

    @property
    def ratios(self) -> list[float]:
        """The finite ratios of the runs."""
        return [run.ratio for run in self.runs if run.ratio is not None]

    @property
    def title(self) -> str:
        """Name and baseline, which tell a claim from all others of its benchmark."""
        return f"{self.newest.name} against {self.newest.baseline_name}"

    def ratio_text(self, *, with_range: bool = True) -> str:
        """Writes the median of the ratios and their range: "2.81x (2.62-3.30, 4 runs)".

        A single run has the range of its own rounds, where the benchmark gives one.
        """
        if not self.ratios:
            return "not finite"
        text = f"{format_number(median(self.ratios))}x"
        if not with_range:
            return text
        ends = (min(self.ratios), max(self.ratios)) if len(self.runs) > 1 else self.newest.spread
        notes = ["-".join(map(format_number, ends))] if ends else []
        notes.append("1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs")
        machines = len({run.machine for run in self.runs})
        if machines > 1:
            notes[-1] += f" on {machines} machines"
        if len(self.ratios) < len(self.runs):
            notes.append(f"{len(self.runs) - len(self.ratios)} not finite")
        wrong = sum(not run.correct for run in self.runs)
        if wrong:
            notes.append(f"{wrong} NOT CORRECT")
        return f"{text} ({', '.join(notes)})"

    def outcome(self) -> str:
        """Writes whether results were correct and aims met, counting runs: "correct; aim 2x met"."""
        wrong = sum(not run.correct for run in self.runs)
        text = f"NOT CORRECT{self._share(wrong)}" if wrong else "correct"
        aimed = [run for run in self.runs if run.aim is not None]
        if not aimed:
            return text
        missed = sum(not run.is_aim_met for run in aimed)
        verdict = f"MISSED{self._share(missed)}" if missed else "met"
        return f"{text}; aim {aimed[-1].aim:.3g}x {verdict}"

    def _share(self, count: int) -> str:
        return "" if count == len(self.runs) else f" in {count} of {len(self.runs)} runs"


def format_number(value: float | None) -> str:
    """Writes three significant digits: 0.0123, 2.81, 371, 48,200; other scales as 1.23e+07."""
    if value is None or not math.isfinite(value):
        return "not finite"
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    if not 1e-3 <= abs(rounded) < 1e6:
        return f"{rounded:.2e}"
    return f"{rounded:,.0f}" if abs(rounded) >= 1e3 else f"{rounded:#.3g}".rstrip(".")


def read_history(path: Path) -> list[ClaimRun]:
    """Reads all runs, in the order in which they were recorded; a missing file holds none.

    Raises:
        ValueError: when a line is no run of a claim; names the line.
    """
    if not path.is_file():
        return []
    known = {field.name for field in fields(ClaimRun)}
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: expected JSON, {error}") from error
        keys = set(record) if isinstance(record, dict) else set()
        if keys != known:
            raise ValueError(
                f"{path}:{number}: expected the fields of a run, got unknown {sorted(keys - known)}, "
                f"missing {sorted(known - keys)}"
            )
        values: dict[str, Any] = {**record, "spread": record["spread"] and tuple(record["spread"])}
        renamed = _RENAMED.get((record["package"], record["benchmark"]), {})
        values["baseline_name"] = renamed.get(record["baseline_name"], record["baseline_name"])
        runs.append(ClaimRun(**values))
    return runs


def append_history(path: Path, runs: Iterable[ClaimRun]) -> None:
    """Appends runs to the file, one line each, on disk when this returns."""
    lines = [json.dumps(asdict(run), allow_nan=False) + "\n" for run in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def without_pick(baseline_name: str) -> str:
    """What tells a claim from others of its name: its baseline's name up to a colon."""
    return baseline_name.partition(": ")[0]


def current_series(runs: Iterable[ClaimRun]) -> list[Series]:
    """Returns the runs that count, claim by claim, in the order of each claim's first run."""
    # Lines of two checkouts may have been merged in any order.
    runs = sorted(runs, key=lambda run: run.date)
    revisions: dict[tuple[str, str], int] = {}
    for run in runs:
        key = (run.package, run.benchmark)
        revisions[key] = max(run.revision, revisions.get(key, 1))
    found: dict[tuple[str, ...], list[ClaimRun]] = {}
    for run in runs:
        key = (run.package, run.benchmark)
        if run.revision == revisions[key]:
            found.setdefault((*key, run.name, without_pick(run.baseline_name)), []).append(run)
    return [Series(tuple(of_claim)) for of_claim in found.values()]
