"""Contenders as running jobs: start one, disturb one of its ranks, and read when all are at work again."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import HOME
from shared.comms import NetLab

__all__ = [
    "RECOVER_S",
    "Failure",
    "Job",
    "Lost",
    "swift",
    "swift_on_two_hosts",
    "torchft",
    "torchrun",
]

HERE = Path(__file__).parent
RANKS = {"linear": 3, "minilm": 3, "llama": 4}
"""By kind of model."""
_LOOK_S = 0.002
_START_S, RECOVER_S = 90.0, 60.0
_REST_S = 8.0
"""Between two kills: dead processes are started again and spares are warm by then."""


class Lost(RuntimeError):
    """A job did not come back."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What one lost rank, or several at once, cost.

    Attributes:
        back_s: seconds from the fault until as many ranks that live have finished the step that was under way
            or a later one.
        stall_s: the longest that a survivor went without finishing a step, less its usual step; None if no
            rank survived.
        step_s: the usual step, the median before the failure.
    """

    back_s: float
    stall_s: float | None
    step_s: float


class Job:
    """A running job.

    Args:
        commands: what to run, by name; one that fails is started again if `is_restarted`.
        folder: where its ranks leave their lines.
        num_ranks: how many are at work.
    """

    def __init__(
        self,
        commands: Mapping[str, list[str]],
        folder: Path,
        num_ranks: int,
        *,
        is_restarted: bool = False,
    ) -> None:
        self._num_ranks = num_ranks
        self._commands, self._folder, self._is_restarted = dict(commands), folder, is_restarted
        self._running = {name: self._start(name) for name in commands}
        self._read: dict[Path, int] = {}
        self.lines: list[dict[str, Any]] = []

    def _start(self, name: str) -> subprocess.Popen:
        log = open(self._folder / f"{name}.log", "ab")  # noqa: SIM115 - the child's for life
        # A store of its own for each attempt: torchrun's workers else find addresses of the last one.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **own_store}
        return subprocess.Popen(
            self._commands[name], stdout=log, stderr=log, env=env, start_new_session=True
        )

    def look(self) -> None:
        """Reads the lines that have come, and starts anew what was killed."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.lines.append(json.loads(line))
                    self._read[path] = self._read.get(path, 0) + len(line)
        for name, process in self._running.items():
            if self._is_restarted and process.poll() not in (None, 0):
                self._running[name] = self._start(name)

    def wait_for(self, step: int, dead: set[int], limit_s: float, since: int = 0) -> float:
        """The second at which as many ranks that live had finished `step` or a later one.

        Args:
            step: the step.
            dead: processes that do not count.
            limit_s: seconds to wait.
            since: number of the first line that counts.

        Raises:
            Lost: they have not in time.
        """
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.look()
            first: dict[int, float] = {}
            for line in self.lines[since:]:
                if line["step"] >= step and line["pid"] not in dead and line.get("is_part", True):
                    first.setdefault(line["rank"], line["at_s"])
            if len(first) >= self._num_ranks:
                return sorted(first.values())[self._num_ranks - 1]
            time.sleep(_LOOK_S)
        words = [
            path.read_text(errors="replace")[-600:] for path in sorted(self._folder.glob("*.log"))
        ]
        raise Lost(f"no {self._num_ranks} ranks finished step {step} in {limit_s:g} s; {words}")

    def fail(self, draw: random.Random, number: int = signal.SIGKILL) -> Failure:
        """Kills or stops a rank at a random moment of a step, and waits until all are at work again."""

        def send(working: list[dict[str, Any]]) -> set[int]:
            victim = draw.choice(working)["pid"]
            os.kill(victim, number)
            return {victim}

        return self.disturb(draw, send)

    def disturb(
        self,
        draw: random.Random,
        fault: Callable[[list[dict[str, Any]]], set[int]],
        settle_steps: int = 12,
    ) -> Failure:
        """Waits for a random moment of a step, commits a fault, and waits until all are at work again.

        Args:
            draw: draws the moment.
            fault: gets the newest line of each rank at work, by rank; returns the processes that it takes
                out of the job.
            settle_steps: steps to wait for before.
        """
        self.look()
        at = max((line["step"] for line in self.lines), default=0)
        known = {line["pid"] for line in self.lines}
        gone = {pid for pid in known if not Path(f"/proc/{pid}").exists()}
        self.wait_for(at + settle_steps, gone, _START_S)
        time.sleep(_REST_S)
        self.look()
        last: dict[int, dict] = {}
        for line in self.lines:
            if line["pid"] not in gone:
                last[line["pid"]] = line
        before: dict[int, list[float]] = {pid: self._times(pid)[-settle_steps:] for pid in last}
        gaps = sorted(b - a for times in before.values() for a, b in itertools.pairwise(times))
        step_s = gaps[len(gaps) // 2]
        time.sleep(draw.random() * step_s)
        self.look()
        target = max(line["step"] for line in self.lines) + 1
        working = [line for line in last.values() if line.get("is_part", True)]
        since, begun = len(self.lines), time.monotonic()
        victims = fault(sorted(working, key=lambda line: line["rank"]))
        back = self.wait_for(target, {*gone, *victims}, RECOVER_S, since)
        survivors = [pid for pid in last if pid not in victims and Path(f"/proc/{pid}").exists()]
        stalls = []
        for pid in survivors:
            times = self._times_beyond(pid, back)
            before_it = max(bisect_right(times, begun) - 1, 0)
            stalls.extend(b - a - step_s for a, b in itertools.pairwise(times[before_it:]))
        return Failure(back - begun, max(stalls, default=None), step_s)

    def _times_beyond(self, pid: int, second: float) -> list[float]:
        """When a process has finished steps, up to its first one behind a second, which is waited for.

        Who was a step ahead as the fault came, is at the step that all come back to before its stall, and
        may finish the next one after the newcomer.
        """
        end = time.monotonic() + RECOVER_S
        while not (times := self._times(pid)) or times[-1] <= second:
            if time.monotonic() > end:
                raise Lost(f"process {pid} finished no step behind the others in {RECOVER_S:g} s")
            time.sleep(_LOOK_S)
            self.look()
        return times[: bisect_right(times, second) + 1]

    def _times(self, pid: int) -> list[float]:
        return [line["at_s"] for line in self.lines if line["pid"] == pid and "digest" not in line]

    def digests(self) -> set[str]:
        """Digests of the final states that ranks have left."""
        self.look()
        return {line["digest"] for line in self.lines if "digest" in line}

    def wait(self, limit_s: float) -> None:
        """Waits until all commands have ended."""
        end = time.monotonic() + limit_s
        while any(process.poll() is None for process in self._running.values()):
            if time.monotonic() > end:
                raise Lost(f"the job did not end in {limit_s:g} s")
            self.look()
            time.sleep(0.02)

    def stop(self) -> None:
        """Kills all processes of the job."""
        self._is_restarted = False
        self.look()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in {line["pid"] for line in self.lines}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _stopped(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.stop()


@contextmanager
def swift(
    folder: Path,
    kind: str,
    steps: int,
    mode: str = "exact",
    spares: int = 1,
    options: Sequence[str] = (),
) -> Iterator[Job]:
    """Ours, with warm spares; `options` are `meshyard-swift run`'s."""
    words = _swift_run(RANKS[kind], "--spares", str(spares), *options)
    command = [*words, *_swift_script(folder, kind, steps), "--mode", mode]
    with _stopped(Job({"run": command}, folder, RANKS[kind])) as job:
        yield job


@contextmanager
def swift_on_two_hosts(
    folder: Path, lab: NetLab, kind: str, steps: int, ranks_a_host: int, options: Sequence[str]
) -> Iterator[Job]:
    """Ours on two emulated hosts, as many spares as a host has ranks on the first one."""
    commands = {}
    for host in range(2):
        hosts = ["--nnodes", "2", "--node-rank", str(host), "--master-addr", lab.address(0)]
        spares = ["--spares", str(0 if host else ranks_a_host)]
        commands[f"host{host}"] = [
            *lab.command(host),
            *("env", "GLOO_SOCKET_IFNAME=veth0"),
            *_swift_run(ranks_a_host, *spares, *hosts, *options),
            *_swift_script(folder, kind, steps),
        ]
    with _stopped(Job(commands, folder, 2 * ranks_a_host)) as job:
        yield job


def _swift_run(num_ranks: int, *options: str) -> list[str]:
    """The command line up to the script."""
    return [sys.executable, "-m", "swift", "run", "-n", str(num_ranks), *options]


def _swift_script(folder: Path, kind: str, steps: int) -> list[str]:
    """The script and its arguments."""
    name = "swift_sharded.py" if kind == "llama" else "swift_train.py"
    return [str(HERE / name), "--", *_args(folder, kind, steps)]


@contextmanager
def torchrun(folder: Path, kind: str, steps: int) -> Iterator[Job]:
    """torchrun, looking for dead ranks ten times a second, a checkpoint of every step."""
    options = [
        "--nproc-per-node",
        str(RANKS[kind]),
        "--max-restarts",
        "100",
        "--monitor-interval",
        "0.1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    name = "torchrun_sharded.py" if kind == "llama" else "torchrun_train.py"
    command += [str(HERE / name), *_args(folder, kind, steps)]
    with _stopped(Job({"run": command}, folder, RANKS[kind])) as job:
        yield job


@contextmanager
def torchft(
    folder: Path,
    kind: str,
    steps: int,
    *,
    heartbeat_timeout_ms: int = 5000,
    join_timeout_ms: int = 10000,
    has_spare: bool = False,
) -> Iterator[Job]:
    """torchft: replica groups of one process each, a killed one is started again at once.

    Args:
        folder: where its ranks leave their lines.
        kind: the model.
        steps: how many.
        heartbeat_timeout_ms: the lighthouse's; 5,000 is its default.
        join_timeout_ms: how long its lighthouse waits for groups that live but have not come yet; 10,000 as
            torchft's examples set it.
        has_spare: whether a fourth group runs along and takes the dead one's place, and messages and ticks
            have short limits too.
    """
    python = str(HOME / ".peers" / "torchft" / "bin" / "python")
    house = subprocess.Popen(
        [
            python, HERE / "torchft_lighthouse.py", "--min-replicas", "1",
            "--join-timeout-ms", str(join_timeout_ms),
            "--quorum-tick-ms", "10" if has_spare else "100",
            "--heartbeat-timeout-ms", str(heartbeat_timeout_ms),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert house.stdout is not None, "the child was started with pipes"
        address = house.stdout.readline().strip()
        beat = max(1, min(100, heartbeat_timeout_ms // 10))
        commands = {}
        for replica in range(RANKS[kind] + has_spare):
            script = [str(HERE / "torchft_rank.py"), *_args(folder, kind, steps)]
            script += [
                "--lighthouse",
                address,
                "--replica",
                str(replica),
                "--replicas",
                str(RANKS[kind]),
            ]
            script += ["--heartbeat-ms", str(beat), *(["--has-spare"] if has_spare else [])]
            commands[f"group{replica}"] = [python, *script]
        with _stopped(Job(commands, folder, RANKS[kind], is_restarted=True)) as job:
            yield job
    finally:
        house.kill()
        house.wait()


def _args(folder: Path, kind: str, steps: int) -> list[str]:
    return ["--kind", kind, "--steps", str(steps), "--folder", str(folder)]
