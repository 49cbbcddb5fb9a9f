"""The tour: every package shows its main job on this machine, and one page collects the claims.

`hatch run demo [packages]` runs `python -m <package> demo --out DIR` for each package under
packages/, one after another, as a child process. The table that follows holds each package's claims
(`shared.claims`), and report/index.html the same with one picture a package. `--check` runs
nothing and judges the report that is there, more strictly: enough claims, finite ratios, a picture.

Exit status: 0 done, 1 a demo failed or a result is not correct, 2 usage.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from page import counted, render_page
from shared.claims import Claim, Demo, faults, read_demo
from shared.errors import MeshyardError
from summary import claim_ratio_text, figures_text

__all__ = ["Visit", "main"]

ROOT = Path(__file__).parents[1]
TAIL_LINES = 25
QUICK_TIMEOUT_S = 240.0
FULL_TIMEOUT_S = 3600.0


@dataclass(slots=True)
class Visit:
    """What became of one package's demo."""

    package: str
    directory: Path
    purpose: str = ""
    demo: Demo | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    stderr_tail: str = ""
    skipped: list[str] = field(default_factory=list)


def known_packages() -> list[str]:
    """Returns the import names of the packages in this checkout."""
    return sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__main__.py"))


def chosen_packages(names: list[str]) -> list[str]:
    """Returns the packages to visit; exits with status 2 when one cannot be run."""
    known = known_packages()
    for name in names:
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or find_spec(name) is None:
            print(
                f"tour: expected names of packages, got {name!r}; here are: {' '.join(known)}",
                file=sys.stderr,
            )
            raise SystemExit(2)
    return list(dict.fromkeys(names)) or known


def purpose_of(package: str) -> str:
    """Returns the line that says what a package is for; "" for one from outside this checkout."""
    for project in ROOT.glob(f"packages/*/src/{package}/__main__.py"):
        text = (project.parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)["project"]["description"]
    return ""


def run_demo(visit: Visit, *, full: bool, timeout_s: float, show) -> None:
    """Runs one demo as a child process and fills in `visit`; `show` gets each line it prints."""
    directory = visit.directory
    directory.mkdir(parents=True, exist_ok=True)
    # A failing demo must not pass off an earlier run's claims as its own.
    for stale in [directory / "demo.json", *directory.glob("*.svg")]:
        stale.unlink(missing_ok=True)
    command = [sys.executable, "-m", visit.package, "demo", "--out", str(directory)]
    if full:
        command.append("--full")
    started = time.monotonic()
    with (directory / "stderr.log").open("w+", encoding="utf-8", errors="replace") as log:
        # A session of its own, so that a demo out of time is ended with every rank it started.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        reader = threading.Thread(target=_follow, args=(child, visit, show), daemon=True)
        reader.start()
        try:
            status = child.wait(timeout=timeout_s)
            if status != 0:
                visit.problems.append(f"the demo ended with exit status {status}")
        except subprocess.TimeoutExpired:
            visit.problems.append(f"the demo was still running after {timeout_s:.0f} s")
        finally:
            _end_session(child)
            reader.join(timeout=5.0)
        visit.seconds = time.monotonic() - started
        log.seek(0)
        visit.stderr_tail = "".join(deque(log, TAIL_LINES)).rstrip()


def _follow(child: subprocess.Popen[str], visit: Visit, show) -> None:
    assert child.stdout is not None, "the child was started with a pipe"
    for line in child.stdout:
        line = line.strip()
        if line.lower().startswith("skipped"):
            visit.skipped.append(line)
        if line:
            show(line)


def _end_session(child: subprocess.Popen[str]) -> None:
    for number, grace_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        if child.poll() is not None:
            return
        os.killpg(child.pid, number)
        try:
            child.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            continue


def judge(visit: Visit, *, strict: bool) -> None:
    """Reads the demo's file and notes what is wrong with it.

    Args:
        visit: the visit, whose `problems` grow.
        strict: also require enough claims, finite figures and a picture.
    """
    try:
        visit.demo = read_demo(visit.directory)
    except MeshyardError as error:
        visit.problems.append(str(error))
        return
    if visit.demo.package != visit.package:
        visit.problems.append(f"demo.json is of package {visit.demo.package!r}")
    if strict:
        visit.problems.extend(faults(visit.demo))
    else:
        visit.problems.extend(
            f"claim {claim.name!r} is not correct: {claim.detail or 'no detail given'}"
            for claim in visit.demo.claims
            if not claim.correct
        )


def claims_table(visits: list[Visit]) -> Table:
    """Builds the table of claims that the terminal shows."""
    table = Table(title="Claims", title_justify="left")
    table.add_column("package", style="bold", no_wrap=True)
    table.add_column("claim", ratio=3)
    table.add_column("ours", justify="right")
    table.add_column("baseline", justify="right", ratio=2)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("correct", no_wrap=True)
    for visit in visits:
        claims = visit.demo.claims if visit.demo else ()
        for claim in claims:
            table.add_row(*_row(visit.package, claim), end_section=claim is claims[-1])
    return table


def _row(package: str, claim: Claim) -> tuple[str, ...]:
    ours, baseline = figures_text(claim)
    return (
        package,
        escape(claim.name),
        escape(ours),
        escape(f"{baseline}\n{claim.baseline_name}"),
        claim_ratio_text(claim),
        claim.kind,
        "yes" if claim.correct else "[bold red]NO[/]",
    )


def tell(console: Console, visits: list[Visit]) -> None:
    """Prints the table of claims, what was skipped and what went wrong."""
    console.print(claims_table(visits))
    for visit in visits:
        for line in visit.skipped:
            console.print(f"{visit.package}: {line}", markup=False)
    for visit in visits:
        for problem in visit.problems:
            console.print(f"{visit.package}: {problem}", style="red", markup=False)
        if visit.problems and visit.stderr_tail:
            console.print(f"{visit.package}: the end of its stderr:", style="red", markup=False)
            console.print(visit.stderr_tail, markup=False, highlight=False)


def walk(console: Console, visits: list[Visit], *, full: bool, timeout_s: float) -> None:
    """Runs every demo with a progress display, or plain lines where there is no terminal."""
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("[bold]{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", style="dim"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = [
            progress.add_task(visit.package, total=1, start=False, line="waiting")
            for visit in visits
        ]
        for number, (task, visit) in enumerate(zip(tasks, visits, strict=True), start=1):
            progress.start_task(task)
            if not console.is_terminal:
                console.print(f"[{number}/{len(visits)}] {visit.package} demo ...", markup=False)

            def show(line: str, task=task) -> None:
                progress.update(task, line=escape(line[:100]))

            run_demo(visit, full=full, timeout_s=timeout_s, show=show)
            judge(visit, strict=False)
            num_claims = len(visit.demo.claims) if visit.demo else 0
            outcome = "failed" if visit.problems else counted(num_claims, "claim")
            progress.update(task, completed=1, line=outcome)
            if not console.is_terminal:
                console.print(
                    f"[{number}/{len(visits)}] {visit.package}: {outcome}, {visit.seconds:.1f} s",
                    markup=False,
                )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="hatch run demo", description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", help="packages to visit; none named: all")
    parser.add_argument("--out", type=Path, default=ROOT / "report", help="folder of the report")
    parser.add_argument("--full", action="store_true", help="the long form of each demo")
    parser.add_argument("--timeout", type=float, help="seconds a demo may take")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; judge the report that is there"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tour and returns its exit status."""
    arguments = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    out = arguments.out.resolve()
    names = chosen_packages(arguments.packages)
    visits = [Visit(name, out / name, purpose_of(name)) for name in names]
    if arguments.check:
        for visit in visits:
            judge(visit, strict=True)
    else:
        timeout_s = arguments.timeout or (FULL_TIMEOUT_S if arguments.full else QUICK_TIMEOUT_S)
        walk(console, visits, full=arguments.full, timeout_s=timeout_s)
        page = out / "index.html"
        page.write_text(render_page(visits, full=arguments.full), encoding="utf-8")
    tell(console, visits)
    if not arguments.check:
        console.print(f"Report: {out / 'index.html'}", markup=False, soft_wrap=True)
    failed = [visit.package for visit in visits if visit.problems]
    total = sum(len(visit.demo.claims) for visit in visits if visit.demo)
    verdict = f"failed: {', '.join(failed)}" if failed else "all correct"
    console.print(
        f"{counted(len(visits), 'package')}, {counted(total, 'claim')}, {verdict}", style="bold"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
