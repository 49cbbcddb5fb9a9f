"""The demo: a small Llama learns verses; a replica is killed, then a pipeline loses a stage.

A process does the trainings (`swift.training.verses`) under `meshyard-swift run`, one after another: each
undisturbed, and again with a rank that kills itself in the middle of a step. Then another process starts
the replicas anew, once the machine has all they import in its caches: the least that a failure costs where
all ranks are started again. A pipeline starts anew in the same time, most of which is imports. The long
form has two kills, and the same training under torchrun, which starts all ranks again from a checkpoint of
every step.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.claims import Claim, finish
from shared.data.texts.bible import read_bible
from shared.errors import MeshyardError
from shared.training.progress import show_progress
from swift.report import PHASES, read_failures
from swift.timeline import Bar, draw_failure, place_phases

__all__ = ["DemoTraining", "judge", "run"]

_RANKS = 2
_LIMIT_S = 300.0
_MODEL = "transformers.models.llama.modeling_llama"
_SHORT, _FULL = 20, 200
_KILLED_AT = {"replicas": (11,), "pipeline": (14,)}
_KILLED_AT_FULL = {"replicas": (50, 120), "pipeline": (110,)}
# Runs of one process fork their ranks from one template, which has imported torch and the model. The process
# ends without the interpreter's teardown: torch's takes half a second.
_RUNS = (
    "import atexit, json, os, sys; from swift.cli import main; "
    "status = any(main(words) for words in json.loads(sys.argv[1])); "
    "atexit._run_exitfuncs(); sys.stdout.flush(); os._exit(status)"
)
_TORCHRUN = (
    *("torch.distributed.run", "--standalone", "--max-restarts", "3"),
    *("--monitor-interval", "0.1"),
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Workers that torchrun starts again would find the addresses of those before in its own store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_SCRIPT = Path(__file__).parent / "training" / "verses.py"
_TEXT_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class DemoTraining:
    """What a training came to.

    Attributes:
        digests: of the final state, by rank.
        steps: seconds of the machine's clock at which steps ended, by process: rank, step, seconds.
        failures: `swift.report`'s records.
        started_s: when its process was launched, by the same clock; it may have done other trainings
            before.
    """

    digests: Mapping[int, str]
    steps: Mapping[int, Sequence[tuple[int, int, float]]]
    failures: Sequence[Mapping[str, Any]]
    started_s: float

    @property
    def start_s(self) -> float:
        """Seconds from the process's launch to the beginning of the first step; 0 if there is none."""
        first_s = min((ends[0][2] for ends in self.steps.values() if ends), default=self.started_s)
        return first_s - self.started_s


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Args:
        out: folder, made when missing.
        is_full: the long form: more steps, a second kill, and torchrun's restart.

    Returns:
        Whether every claim's result was correct.

    Raises:
        MeshyardError: a training failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    steps = _FULL if is_full else _SHORT
    kills = _KILLED_AT_FULL if is_full else _KILLED_AT
    with (
        # Ranks of a training that is killed may write to it a moment longer.
        tempfile.TemporaryDirectory(dir=out, ignore_cleanup_errors=True) as folder,
        show_progress("swift: training") as progress,
    ):
        text = _write_verses(Path(folder) / "verses.txt")
        progress.update("swift: training, replicas and a pipeline, undisturbed and killed")
        jobs = {
            f"{kind}, {how}": _Job(kind, steps, kill_steps)
            for kind, killed_at in kills.items()
            for how, kill_steps in (("undisturbed", ()), ("killed", killed_at))
        }
        with _begin_runs(Path(folder) / "trainings", jobs, text) as first:
            found = first.wait()
        progress.update("swift: starting all replicas anew")
        anew = {"replicas": _Job("replicas", 1, ())}
        with _begin_runs(Path(folder) / "anew", anew, text) as second:
            start_s = second.wait()["replicas"].start_s
        restarted = None
        if is_full:
            progress.update("swift: training, replicas under torchrun, killed")
            job = _Job("torchrun", steps, kills["replicas"][:1])
            with _begin_torchrun(Path(folder), job, text) as third:
                restarted = third.wait()["torchrun"]
    disturbed = {kind: found[f"{kind}, killed"] for kind in kills}
    _draw(disturbed["replicas"], out / "failure.svg")
    claims = [
        claim
        for kind in kills
        for claim in judge(kind, found[f"{kind}, undisturbed"], disturbed[kind], start_s=start_s)
    ]
    if restarted is not None:
        claims.append(judge_restart(disturbed["replicas"], restarted, kills["replicas"][0]))
    figures = {kind: list(training.failures) for kind, training in disturbed.items()}
    return finish(out, "swift", claims, figures)


def judge(
    kind: str, quiet: DemoTraining, disturbed: DemoTraining, *, start_s: float
) -> list[Claim]:
    """What a training that lost a rank shows beside its undisturbed run.

    Args:
        kind: "replicas" or "pipeline".
        quiet: the run without a failure.
        disturbed: the run with some.
        start_s: seconds until replicas that are started anew begin to step.
    """
    what = "a replica" if kind == "replicas" else "a pipeline stage"
    expected = [quiet.digests.get(rank) for rank in range(_RANKS)]
    same = [disturbed.digests.get(rank) == expected[rank] for rank in range(_RANKS)]
    is_right = all(same) and None not in expected and bool(disturbed.failures)
    longest = [_outage_s(failure) for failure in disturbed.failures]
    told = "; ".join(failure["reason"] for failure in disturbed.failures) or "no rank was lost"
    return [
        Claim(
            name=f"seconds until all are at work again, {what} killed",
            unit="s",
            ours=max(longest, default=float("nan")),
            baseline=start_s,
            baseline_name="starting all replicas anew, imports cached, up to their first step",
            higher_is_better=False,
            correct=is_right,
            detail=told,
            source="meshyard-swift demo",
        ),
        Claim(
            name=f"ranks that end as undisturbed, bit for bit, {what} killed",
            unit=f"of {_RANKS}",
            ours=float(sum(same)),
            baseline=float(_RANKS),
            baseline_name="the run without a failure",
            higher_is_better=True,
            correct=is_right,
            detail=told,
            source="meshyard-swift demo",
        ),
    ]


def judge_restart(disturbed: DemoTraining, restarted: DemoTraining, killed_at: int) -> Claim:
    """What a killed replica costs beside torchrun, which starts all ranks again.

    Args:
        disturbed: ours that lost a rank.
        restarted: torchrun's that did.
        killed_at: in which step.
    """
    begins = [at_s for ends in restarted.steps.values() for _, at, at_s in ends if at == killed_at]
    # A rank that had finished the step tells so again, as it resumes behind it.
    ended: dict[int, float] = {}
    for ends in restarted.steps.values():
        for rank, at, at_s in ends:
            if at == killed_at + 1:
                ended[rank] = max(at_s, ended.get(rank, 0.0))
    restarts = [max(ended.values()) - min(begins)] if len(ended) == _RANKS and begins else []
    outages = [_outage_s(failure) for failure in disturbed.failures]
    return Claim(
        name="seconds until all are at work again, a replica killed, beside torchrun",
        unit="s",
        ours=max(outages, default=float("nan")),
        baseline=max(restarts, default=float("nan")),
        baseline_name="torchrun, from a checkpoint of every step",
        higher_is_better=False,
        correct=bool(outages and restarts) and len(restarted.digests) == _RANKS,
        detail=f"torchrun looks for dead ranks ten times a second; {len(outages)} of ours killed",
        source="meshyard-swift demo --full",
    )


def _outage_s(failure: Mapping[str, Any]) -> float:
    return sum(
        max(one["seconds"].get(phase, 0.0) for one in failure["ranks"].values()) for phase in PHASES
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """A training of `swift.training.verses`, and the steps in which a rank kills itself."""

    kind: str
    steps: int
    kills: Sequence[int]

    def words(self, folder: Path, text: Path) -> list[str]:
        kills = (word for step in self.kills for word in ("--kill", str(step)))
        names = [self.kind, str(folder), str(text)]
        return [str(_SCRIPT), *names, "--steps", str(self.steps), *kills]


def _write_verses(path: Path) -> Path:
    """Writes the beginning of the American Standard Version, whose module takes ranks long to import."""
    path.write_bytes(read_bible().encode()[:_TEXT_BYTES])
    return path


def _begin_runs(folder: Path, jobs: Mapping[str, _Job], text: Path) -> _Trainings:
    """Begins trainings under `meshyard-swift run`, with a spare where a rank is to be killed."""
    runs = [
        [
            *("run", "-n", str(_RANKS), "--spares", str(int(bool(one.kills)))),
            *("--preload", _MODEL, "--report", str(folder / name / "report.json")),
            *("--", *one.words(folder / name, text)),
        ]
        for name, one in jobs.items()
    ]
    return _Trainings(folder, list(jobs), ["-c", _RUNS, json.dumps(runs)])


def _begin_torchrun(folder: Path, job: _Job, text: Path) -> _Trainings:
    launcher = ["-m", *_TORCHRUN, "--nproc-per-node", str(_RANKS)]
    return _Trainings(folder, ["torchrun"], [*launcher, *job.words(folder / "torchrun", text)])


class _Trainings:
    """Trainings that a process of Python does one after another, each with a folder of its name."""

    def __init__(self, folder: Path, names: Sequence[str], command: Sequence[str]) -> None:
        self._folders = {name: folder / name for name in names}
        for one in self._folders.values():
            one.mkdir(parents=True)
        self._log = self._folders[names[0]] / "output.txt"
        self._started_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT},
            )

    def __enter__(self) -> _Trainings:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> dict[str, DemoTraining]:
        """What each came to, once all have ended.

        Raises:
            MeshyardError: one failed, or they take too long.
        """
        limit_s = _LIMIT_S * len(self._folders)
        try:
            status = self._process.wait(limit_s)
            ended = f"ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            ended = f"did not end in {limit_s:g} s"
        if ended is not None:
            words = self._log.read_text(encoding="utf-8", errors="replace")
            begun = [name for name, folder in self._folders.items() if any(folder.glob("*.jsonl"))]
            raise MeshyardError(
                f"the demo's trainings (begun: {'; '.join(begun) or 'none'}) {ended}; "
                f"their last words: {words[-2000:]}"
            )
        return {name: _read(folder, self._started_s) for name, folder in self._folders.items()}


def _read(folder: Path, started_s: float) -> DemoTraining:
    digests: dict[int, str] = {}
    steps: dict[int, list[tuple[int, int, float]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "digest" in line:
                digests[line["rank"]] = line["digest"]
            else:
                ends = steps.setdefault(int(path.stem), [])
                ends.append((line["rank"], line["step"], line["at_s"]))
    report = folder / "report.json"
    failures = read_failures(report) if report.exists() else []
    return DemoTraining(digests, steps, failures, started_s)


def _draw(found: DemoTraining, path: Path) -> None:
    """Draws the first failure, two steps before it to three after it."""
    if not found.failures:
        return
    failure = found.failures[0]
    target = failure["target"]
    rows: dict[str, list[Bar]] = {}
    known: set[int] = set()
    lost = None
    for ends in sorted(found.steps.values(), key=lambda ends: (ends[0][0], ends[0][2])):
        rank = ends[0][0]
        bars = [
            Bar("step", before[2], end[2])
            for before, end in itertools.pairwise(ends)
            if target - 3 < end[1] <= target + 3 and end[1] != target + 1
        ]
        repeated_s = next((at for _, step, at in ends if step == target + 1), None)
        phases = failure["ranks"].get(str(rank))
        name = f"spare, now rank {rank}" if rank in known else f"rank {rank}"
        known.add(rank)
        if repeated_s is None:
            name = f"rank {rank}, killed"
        elif phases is not None:
            recovery = place_phases(phases["seconds"], repeated_s)
            bars = [
                bar for bar in bars if bar.end_s <= recovery[0].start_s or bar.start_s >= repeated_s
            ]
            bars += recovery
            lost = min(lost or recovery[0].start_s, recovery[0].start_s)
        rows[name] = bars
    killed = next((name for name in rows if name.endswith("killed")), None)
    draw_failure(rows, path, lost=None if killed is None or lost is None else (killed, lost))
