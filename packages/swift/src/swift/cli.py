"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shared.cli import Command, DemoOptions, JsonOption, run_command
from shared.errors import ConfigError
from swift.membership.client import parse_address
from swift.membership.record import expect_picture
from swift.membership.settings import Launch, Settings
from swift.pipeline.commands import PlanLogs, Simulate, VerifyLog

__all__ = ["main"]

_ABOUT = """Train on: a lost rank costs a fraction of a second, and not one bit of the result.

Instead of `torchrun --nproc-per-node 4 train.py`:
  meshyard-swift run -n 4 --spares 1 train.py

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScript:
    """Start a script's ranks and spares on this host, and keep them in number.

    Several hosts, each with its --node-rank; the first holds the store:
      meshyard-swift run -n 4 --spares 1 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train.py

    Examples:
        meshyard-swift run -n 4 --spares 1 train.py
        meshyard-swift run -n 2 --spares 1 --heartbeat 5 --report failures.json train.py
    """

    script: tyro.conf.Positional[tuple[str, ...]]
    """The script, a .py file, and its arguments; another kind of file stands behind --."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Ranks on this host."""
    spares: int = 1
    """Processes on this host that wait for a rank to be lost."""
    heartbeat: float = 5.0
    """Seconds of silence after which a process, or a host, is taken for lost."""
    report: Path | None = None
    """Write what failed and what each recovery took here, as JSON."""
    picture: Path | None = None
    """Draw the newest failure here, second by second, when the run has ended (SVG)."""
    nnodes: int = 1
    """Hosts."""
    node_rank: int = 0
    """Number of this host."""
    master_addr: str = "127.0.0.1"
    """Address of the first host."""
    master_port: int = 0
    """Port of the first supervisor; any free one on a single host, 29500 on several."""
    min_ranks: int | None = None
    """Continue with fewer ranks, but at least these, when no spare comes; never by default, as the result differs."""
    wait: float = 300.0
    """Seconds to wait for a spare, or for the first supervisor."""
    timeout: float = 600.0
    """Seconds that a message between ranks may take: more than one rank computes while the others wait for it."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the ranks' messages; nccl is untested on several GPUs."""
    preload: tuple[str, ...] = ()
    """Modules that processes have imported when they start, such as transformers."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(
                f"-n: expected at least one rank on this host, got {self.n}; give as many as it has "
                f"GPUs, or cores to spare, as in -n 2"
            )
        if self.nnodes < 1:
            raise ConfigError(
                f"--nnodes: expected at least one host, got {self.nnodes}; give as many as the run has"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank: expected 0 to {self.nnodes - 1} for --nnodes {self.nnodes}, got "
                f"{self.node_rank}; give the number of hosts by --nnodes, and number them from 0"
            )

        if not 0 <= self.master_port <= 65535:
            raise ConfigError(
                f"--master-port: expected 0 to 65535, got {self.master_port}; leave it out for a free one, "
                f"or 29500 on several hosts"
            )
        if self.picture is not None:
            expect_picture(self.picture)
        # Made here, so that what is wrong with them is wrong usage, and said before torch is imported.
        self._settings()
        self._launch()

    def _settings(self) -> Settings:
        total = self.n * self.nnodes
        return Settings(
            num_ranks=total,
            min_ranks=total if self.min_ranks is None else self.min_ranks,
            wait_s=self.wait,
            backend=self.backend,
            timeout_s=self.timeout,
        )

    def _launch(self) -> Launch:
        return Launch(
            script=self.script,
            host=self.node_rank,
            ranks=tuple(range(self.node_rank * self.n, (self.node_rank + 1) * self.n)),
            num_spares=self.spares,
            world_size=self.n * self.nnodes,
            heartbeat_s=self.heartbeat,
            preload=self.preload,
        )

    def execute(self) -> int:
        """Supervises the run to its end."""
        from swift.membership.first_host import FirstHost, listen
        from swift.membership.host_loop import environment
        from swift.membership.other_host import OtherHost
        from swift.membership.record import FailureRecord

        launch = replace(self._launch(), env=environment(is_single=self.nnodes == 1))
        port = self.master_port or (0 if self.nnodes == 1 else 29500)
        if self.node_rank:
            with OtherHost(launch, (self.master_addr, port), self.wait) as other:
                return other.run()
        listener = listen(self.master_addr, port)
        record = FailureRecord(self.report, self.picture)
        with FirstHost(launch, self._settings(), listener, record) as first:
            return first.run(self.master_addr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(JsonOption):
    """Show the ranks, spares and failures of a run.

    Examples:
        meshyard-swift status
        meshyard-swift status --at 10.0.0.1:29500
    """

    at: str | None = None
    """Address of the first supervisor, host:port; that of this host's newest run by default."""

    def __post_init__(self) -> None:
        if self.at is not None:
            parse_address(self.at)

    def execute(self) -> None:
        """Prints a line a process."""
        from swift.membership.client import ask
        from swift.report import describe_failures

        found = ask(self.at, {"kind": "status"})
        num = found["num_recoveries"]
        lines = [f"{num} recover{'y' if num == 1 else 'ies'}" if num else "no rank was lost"]
        for one in found["processes"]:
            title = f"rank {one['rank']}" if one["rank"] is not None else "spare"
            state = "" if one["is_ready"] else ", starting"
            lines.append(f"{title:<8} host {one['host']}, step {one['step']}{state}")
        lost_spares = found.get("lost_spares", [])
        lines += [f"spare    host {one['host']}, {one['how']}" for one in lost_spares]
        if lost_spares and all(one["rank"] is not None for one in found["processes"]):
            lines.append("no spare is left")
        if found["failures"]:
            lines.append(describe_failures(found["failures"]))
        self.print_result(found, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject(JsonOption):
    """Disturb a run: kill or stop a rank, or cut its host off.

    Examples:
        meshyard-swift inject kill 2
        meshyard-swift inject cut 1 --seconds 10
    """

    fault: tyro.conf.Positional[Literal["kill", "stop", "cut"]]
    """kill (SIGKILL), stop (SIGSTOP), or cut: its host's link, GLOO_SOCKET_IFNAME, goes down."""
    rank: tyro.conf.Positional[int]
    """Which rank."""
    seconds: float = 30.0
    """How long a host is cut off."""
    at: str | None = None
    """Address of the first supervisor, host:port; that of this host's newest run by default."""

    def __post_init__(self) -> None:
        if self.at is not None:
            parse_address(self.at)
        if self.rank < 0 or not (isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(
                f"expected a rank of 0 or more and --seconds above 0, got {self.rank} and "
                f"{self.seconds:g}; see meshyard-swift status for the ranks"
            )

    def execute(self) -> None:
        """Asks the run's first supervisor to do it."""
        from swift.membership.client import ask

        request = {
            "kind": "inject",
            "fault": self.fault,
            "rank": self.rank,
            "seconds": self.seconds,
        }
        found = ask(self.at, request)
        self.print_result(found, f"{self.fault}: rank {self.rank}, process {found['process']}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train a small Llama, kill a replica, lose a pipeline stage, and compare every bit.

    Examples:
        meshyard-swift demo --out report/swift
        meshyard-swift demo --full
    """

    out: Path = Path("report/swift")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more steps, a second kill, and torchrun's restart."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from swift import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands: dict[str, Callable[..., Command]] = {
        "run": RunScript,
        "status": Status,
        "inject": Inject,
        "plan-logs": PlanLogs,
        "verify-log": VerifyLog,
        "simulate": Simulate,
        "demo": Demo,
    }
    words = _mark_script(sys.argv[1:] if argv is None else argv)
    return run_command(commands, prog="meshyard-swift", about=_ABOUT, argv=words)


def _mark_script(argv: list[str]) -> list[str]:
    """Has all that follows `run`'s script be the script's own, its options included."""
    scripts = [at for at, word in enumerate(argv) if word.endswith(".py")]
    subcommand = next((word for word in argv if not word.startswith("-")), None)
    if subcommand != "run" or "--" in argv or not scripts:
        return argv
    return [*argv[: scripts[0]], "--", *argv[scripts[0] :]]
