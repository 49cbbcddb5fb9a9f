"""A new user's first day with each package: `hatch run day-one [PACKAGE ...]`.

For each package it makes a fresh environment with nothing but what the README names, and runs there
every line and block of README and guide, the demo, the examples of every `--help`, every script of
examples/ and the common mistakes. It prints a table (step, exit status, seconds, first line) and
ends with 1 if anything differs from what is expected. Results lie in report/day-one/PACKAGE; a run
that was interrupted resumes there. At another commit, or with `--again`, it begins anew, but with
`--differing` only what differed is run again, after a new installation.

torch's CPU build has to be found by find-links (PIP_FIND_LINKS or pip's own setting): without it pip
would fetch CUDA's packages.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from zlib import crc32

from rich.console import Console
from rich.table import Table

from first_day.inputs import write_inputs
from first_day.steps import Step, read_steps

__all__ = ["Outcome", "main", "run_step", "run_steps"]

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "report" / "day-one"
LIMIT_S = 600.0
# Servers run until they are interrupted.
SERVE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a step ended.

    Attributes:
        key: the step's.
        status: exit status; None where the step was not run, or ran out of time.
        seconds: how long it took.
        line: the first line that it printed, or why it was not run.
        fault: how it differs from what is expected; empty if it does not.
        commit: what was checked out.
    """

    key: str
    status: int | None
    seconds: float
    line: str
    fault: str = ""
    commit: str = ""


def find_fault(step: Step, status: int | None, text: str) -> str:
    """How what a step printed and returned differs from what is expected; empty if it does not."""
    last = text.rstrip().rpartition("\n")[2]
    if status is None:
        return f"expected an end within {LIMIT_S:g} s"
    if step.kind == "mistake":
        if "Traceback" in text:
            return "expected a sentence, got a traceback"
        if status != step.status:
            return f"expected status {step.status}, got {status}: {last}"
        if step.expects not in text:
            return f"expected {step.expects!r} in it, got: {last}"
        return ""
    if step.kind == "install" and " nvidia-" in text:
        return "expected torch's CPU build, got CUDA's packages"
    asked_for = re.findall(r"pip install '?([\w-]+(?:\[\w+\])?)", last)
    if (
        status == 1
        and asked_for
        and step.may_lack.issuperset(asked_for)
        and "Traceback" not in text
    ):
        return ""
    return "" if status == step.status else f"expected status {step.status}, got {status}: {last}"


def run_step(step: Step, folder: Path, env: dict[str, str], limit_s: float = LIMIT_S) -> Outcome:
    """Runs a step in a folder, with what it starts ended afterwards.

    Args:
        step: the step.
        folder: where it is run; its output is kept in `output/` there.
        env: the environment's variables.
        limit_s: seconds after which it is ended.
    """
    if step.why_not:
        return Outcome(key=step.key, status=None, seconds=0.0, line=f"not run: {step.why_not}")
    if step.python:
        (folder / step.line.split()[1]).write_text(step.python, encoding="utf-8")
    log = folder / "output" / f"{crc32(step.key.encode()):08x}.txt"
    log.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            ["bash", "-c", step.line],
            cwd=ROOT if step.kind == "install" else folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _wait(child, limit_s, serves="serve-memory" in step.line)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return Outcome(
        key=step.key,
        status=status,
        seconds=time.monotonic() - begun,
        line=first,
        fault=find_fault(step, status, text),
    )


def _wait(child: subprocess.Popen[bytes], limit_s: float, *, serves: bool) -> int | None:
    """The exit status, None after the time limit; a server is interrupted, and may end by that."""
    with suppress(subprocess.TimeoutExpired):
        if not serves:
            return child.wait(limit_s)
        try:
            return child.wait(SERVE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)
        status = child.wait(limit_s)
        return 0 if status == 130 else status
    return None


def run_steps(
    steps: Iterable[Step],
    folder: Path,
    env: dict[str, str],
    console: Console,
    commit: str = "",
    *,
    only_differing: bool = False,
) -> list[Outcome]:
    """Runs the steps that no earlier run has finished, and returns the outcomes of all.

    Args:
        steps: the steps.
        folder: where they are run; outcomes are appended to `outcomes.jsonl` there as they come.
        env: the environment's variables.
        console: where progress is shown.
        commit: what is checked out.
        only_differing: installations, and steps that differed, are run again.
    """
    file = folder / "outcomes.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {record["key"]: Outcome(**record) for record in map(json.loads, lines)}
    if only_differing:
        known = {
            key: one
            for key, one in known.items()
            if not one.fault and not key.startswith("install: ")
        }
    found = []
    for step in steps:
        if step.key not in known:
            console.print(f"{folder.name}: {step.key}", markup=False, highlight=False)
            known[step.key] = replace(run_step(step, folder, env), commit=commit)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(known[step.key])) + "\n")
        found.append(known[step.key])
        if step.kind == "install" and known[step.key].fault:
            break  # nothing else can be right
    return found


def find_links() -> str:
    """Where torch's CPU build lies, by the variables of pip and uv or by pip's own settings."""
    links = os.environ.get("PIP_FIND_LINKS") or os.environ.get("UV_FIND_LINKS")
    if not links:
        asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
        links = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return links


def prepare(package: str, folder: Path, links: str) -> dict[str, str]:
    """Makes the environment and the files of a package's first day, and returns its variables."""
    if not (folder / "venv" / "bin" / "python").exists():
        folder.mkdir(parents=True, exist_ok=True)
        venv.create(folder / "venv", with_pip=True)
    write_inputs(folder)
    hidden = ("PYTHON", "HATCH", "VIRTUAL_ENV", "MESHYARD", "COVERAGE", "PYTEST", "UV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env |= {
        "PATH": os.pathsep.join([str(folder / "venv" / "bin"), env["PATH"]]),
        "PIP_FIND_LINKS": links,
        "PIP_NO_COMPILE": "1",  # to compile all of torch takes a minute
        "COLUMNS": "120",
    }
    return env


def read_commit() -> str:
    """The commit that is checked out, with a mark where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def draw_table(title: str, outcomes: list[Outcome]) -> Table:
    """The table of a package's outcomes."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("step", "exit", "seconds", "first line"):
        table.add_column(
            name, justify="right" if name in ("exit", "seconds") else "left", max_width=70
        )
    for one in outcomes:
        status = "-" if one.status is None else str(one.status)
        mark = f"DIFFERS, {one.fault}\n" if one.fault else ""
        row = (one.key.replace(f"{ROOT}/", ""), status, f"{one.seconds:.1f}", mark + one.line)
        table.add_row(*(cell.replace("[", r"\[") for cell in row), style="red" if one.fault else "")
    return table


def main(argv: list[str] | None = None) -> int:
    """Runs the packages' first days; returns 1 if a step differs from what is expected."""
    every = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    parser = argparse.ArgumentParser(prog="hatch run day-one", description=__doc__.split("\n\n")[0])
    parser.add_argument("packages", nargs="*", choices=[*every, []], help="all by default")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument(
        "--differing", action="store_true", help="run again what differed, at any commit"
    )
    parser.add_argument("--list", action="store_true", help="list the steps and run none")
    options = parser.parse_args(argv)
    console, is_right = Console(width=None if sys.stdout.isatty() else 200), True
    links = find_links()
    if not links and not options.list:
        parser.error("expected find-links with torch's CPU build; set PIP_FIND_LINKS to its page")
    for package in options.packages or every:
        steps = read_steps(ROOT / "packages" / package)
        if options.list:
            for step in steps:
                console.print(f"{step.key}  {step.why_not}".rstrip(), markup=False, highlight=False)
            continue
        folder, commit = FOLDER / package, read_commit()
        told = folder / "commit.txt"
        is_same = told.exists() and (options.differing or told.read_text() == commit)
        if options.again or not is_same:
            shutil.rmtree(folder, ignore_errors=True)
        env = prepare(package, folder, links)
        told.write_text(commit)
        outcomes = run_steps(steps, folder, env, console, commit, only_differing=options.differing)
        console.print(draw_table(f"{package} at {commit}", outcomes))
        num_faults = sum(bool(one.fault) for one in outcomes)
        num_left = sum(bool(step.why_not) for step in steps[: len(outcomes)])
        num_earlier = sum(one.commit != commit for one in outcomes)
        console.print(
            f"{package}: {len(outcomes)} steps, {num_left} not run, {num_faults} differ from what "
            f"is expected" + (f"; {num_earlier} ran at an earlier commit" if num_earlier else "")
        )
        is_right &= not num_faults
    return int(not is_right)


if __name__ == "__main__":
    # Ended from outside, a run ends what it has started, as with Ctrl-C, and resumes later.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("day-one: interrupted; the same command resumes", file=sys.stderr)
        sys.exit(130)
