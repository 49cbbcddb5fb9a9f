"""A new user's first day with each package: `hatch run day-one [PACKAGE ...]`.

For each package it makes a fresh environment with nothing but what the README names, and runs there
every line and block of README and guide, the demo, the examples of every `--help`, every script of
examples/ and the common mistakes. It prints a table (step, exit status, seconds, first line) and
ends with 1 if anything differs from what is expected. Results lie in report/day-one/PACKAGE; a run
that was interrupted resumes there, unless the commit is another one or `--again` is given.

torch's CPU build has to be found by find-links (PIP_FIND_LINKS or pip's own setting): without it pip
would fetch CUDA's packages.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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
    """

    key: str
    status: int | None
    seconds: float
    line: str
    fault: str = ""


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
    # An extra that the README does not name may be missing, if that is told in a sentence.
    if status == 1 and "pip install" in last and "Traceback" not in text:
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
    serves = "serve-memory" in step.line
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
            status: int | None = child.wait(SERVE_S if serves else limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT if serves else signal.SIGKILL)
            status = child.wait(limit_s)
            status = 0 if serves and status in (0, 130) else None
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    text = log.read_text(encoding="utf-8", errors="replace")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return Outcome(
        key=step.key,
        status=status,
        seconds=time.monotonic() - begun,
        line=first,
        fault=find_fault(step, status, text),
    )


def run_steps(
    steps: Iterable[Step], folder: Path, env: dict[str, str], console: Console
) -> list[Outcome]:
    """Runs the steps that no earlier run has finished, and returns the outcomes of all.

    Outcomes are appended to `outcomes.jsonl` in the folder as they come.
    """
    file = folder / "outcomes.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {record["key"]: Outcome(**record) for record in map(json.loads, lines)}
    found = []
    for step in steps:
        if step.key not in known:
            console.print(f"{folder.name}: {step.key}", markup=False, highlight=False)
            known[step.key] = run_step(step, folder, env)
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


def draw_table(package: str, outcomes: list[Outcome]) -> Table:
    """The table of a package's outcomes."""
    table = Table(title=package, title_justify="left", box=None, pad_edge=False)
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
        if options.again or not told.exists() or told.read_text() != commit:
            shutil.rmtree(folder, ignore_errors=True)
        env = prepare(package, folder, links)
        told.write_text(commit)
        outcomes = run_steps(steps, folder, env, console)
        console.print(draw_table(package, outcomes))
        num_faults = sum(bool(one.fault) for one in outcomes)
        console.print(
            f"{package}: {len(outcomes)} steps, {num_faults} differ from what is expected"
        )
        is_right &= not num_faults
    return int(not is_right)


if __name__ == "__main__":
    # Ended from outside, a run ends what it has started, as with Ctrl-C, and resumes later.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
