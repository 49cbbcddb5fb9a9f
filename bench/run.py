"""Runs the benchmarks and reports over everything that ran.

`hatch run bench [packages]` runs bench/<package>/bench_*.py of the named packages; none named: all,
bench/cross included; `gnnflow/cache` names one file. Options of pytest, `-k` and the like, may
follow. The tables list claims (ours beside a baseline from the same run) and then every timing, by
group; they go to the terminal and to bench/.results/latest.md. With `--keep` each claim is also
appended to bench/results/history.jsonl, and then each benchmark's report there is replaced, with the
pictures that it drew.
"""

import argparse
import datetime
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from definition import Definition
from history import ClaimRun, append_history, current_series, read_history
from machine import commit, describe_machine, versions
from report import (
    claims_table,
    header,
    pictures_of,
    render_report,
    report_path,
    run_table,
    timings_section,
)

__all__ = ["keep_runs", "main"]

ROOT = Path(__file__).parents[1]
NOTHING_COLLECTED = 5


def chosen_files(names: list[str]) -> list[Path]:
    """Returns the folders and files to run; exits with status 2 for a name that has none."""
    known: dict[str, Path] = {}
    for path in sorted(ROOT.glob("bench/*/bench_*.py")):
        known[path.parent.name] = path.parent
        known[f"{path.parent.name}/{path.stem.removeprefix('bench_')}"] = path
    missing = [name for name in names if name not in known]
    if missing:
        print(f"bench: expected some of {sorted(known)}, got {missing}", file=sys.stderr)
        raise SystemExit(2)
    return [known[name] for name in names or known if names or "/" not in name]


def run(paths: Iterable[Path], options: list[str], store: Path) -> tuple[int, list, list]:
    """Runs pytest and returns its exit status, the timings and the claims."""
    timings, claims = store / "latest.json", store / "claims.json"
    store.mkdir(parents=True, exist_ok=True)
    for stale in (timings, claims, *store.glob("*.svg")):
        stale.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", ROOT / "bench/pytest.ini", "--rootdir", ROOT),
            *("-rs", f"--benchmark-json={timings}", f"--claims={claims}", *paths, *options),
        ],
        cwd=ROOT,
        check=False,
    )
    return done.returncode, _read(timings, {}).get("benchmarks", []), _read(claims, [])


def _read(path: Path, empty: Any) -> Any:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return json.loads(text) if text else empty


def benchmark_of(timing: dict[str, Any]) -> tuple[str, str]:
    """Returns package and benchmark of one of pytest-benchmark's rows."""
    path = Path(timing["fullname"].partition("::")[0])
    return path.parent.name, path.stem.removeprefix("bench_")


@dataclass(frozen=True, slots=True)
class Ran:
    """A benchmark that ran: its file, and the versions of what it used."""

    definition: Definition
    versions: dict[str, str]


def benchmarks_that_ran(claims: list[dict], timings: list[dict]) -> dict[tuple[str, str], Ran]:
    """Returns the benchmarks that left a claim or a timing, by package and name."""
    keys = {(claim["package"], claim["benchmark"]) for claim in claims}
    found = {}
    for package, name in sorted({*keys, *map(benchmark_of, timings)}):
        definition = Definition(ROOT / f"bench/{package}/bench_{name}.py")
        found[package, name] = Ran(definition, versions(definition, ROOT))
    return found


def claim_runs(
    claims: list[dict], ran: dict[tuple[str, str], Ran], told: dict[str, str]
) -> list[ClaimRun]:
    """Returns the claims of a run as the history's lines.

    Args:
        claims: what the benchmarks recorded.
        ran: the benchmarks, by package and name.
        told: command, commit, date and machine.
    """
    found = []
    for claim in claims:
        one = ran[claim["package"], claim["benchmark"]]
        spread = claim["spread"] and tuple(claim["spread"])
        fields: dict[str, Any] = {**claim, **told, "spread": spread, "versions": one.versions}
        found.append(ClaimRun(**fields, revision=one.definition.revision))
    return found


def keep_runs(
    runs: list[ClaimRun],
    timings: list[dict],
    ran: dict[tuple[str, str], Ran],
    told: dict[str, str],
    results: Path,
    drawn: Path,
) -> list[Path]:
    """Appends a run to the history, then replaces the reports of the benchmarks that ran.

    Args:
        runs: the claims of the run.
        timings: pytest-benchmark's rows of the run.
        ran: the benchmarks, by package and name.
        told: command, commit, date and machine.
        results: bench/results, or another folder.
        drawn: where the benchmarks drew their pictures.

    Returns:
        The reports written.
    """
    append_history(results / "history.jsonl", runs)
    series = current_series(read_history(results / "history.jsonl"))
    written = []
    for (package, benchmark), one in ran.items():
        folder = one.definition.path.parent
        names = [f"{package}-{path.stem[6:]}" for path in folder.glob("bench_*.py")]
        path = report_path(results, package, benchmark)
        for picture in pictures_of(path.stem, names, drawn):
            shutil.copyfile(picture, results / picture.name)
        text = render_report(
            f"{package}/{benchmark}",
            one.definition,
            header(told, one.versions),
            [s for s in series if (s.newest.package, s.newest.benchmark) == (package, benchmark)],
            [row for row in timings if benchmark_of(row) == (package, benchmark)],
            pictures_of(path.stem, names, results),
        )
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks and returns the exit status."""
    parser = argparse.ArgumentParser(prog="hatch run bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "packages", nargs="*", help="folders of bench/, or files as gnnflow/cache; none named: all"
    )
    parser.epilog = "What follows, from the first other option on, goes to pytest: -k epoch"
    parser.add_argument(
        "--keep", action="store_true", help="append to bench/results/history.jsonl and report there"
    )
    given = sys.argv[1:] if argv is None else argv
    ours = {"--keep", "-h", "--help"}
    others = (at for at, word in enumerate(given) if word.startswith("-") and word not in ours)
    split = next(others, len(given))
    arguments, options = parser.parse_args(given[:split]), given[split:]
    paths = chosen_files(arguments.packages)
    if not paths:
        print("bench: no benchmarks here yet")
        return 0
    told = {
        "command": f"hatch run bench {shlex.join(given)}",
        "commit": commit(ROOT),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": describe_machine(),
    }
    store, results = ROOT / "bench/.results", ROOT / "bench/results"
    status, timings, claims = run(paths, options, store)
    if status == NOTHING_COLLECTED:
        print("bench: the options left nothing to run", file=sys.stderr)
        return 2
    ran = benchmarks_that_ran(claims, timings)
    runs = claim_runs(claims, ran, told)
    everything = {name: found for one in ran.values() for name, found in one.versions.items()}
    parts = ["# Benchmarks", run_table(header(told, everything))]
    parts += [claims_table(current_series(runs))] if runs else []
    parts += [timings_section(timings)] if timings else []
    text = "\n\n".join(parts)
    written = [store / "latest.md"]
    written[0].write_text(text + "\n", encoding="utf-8")
    if arguments.keep:
        written += keep_runs(runs, timings, ran, told, results, store)
    print(text)
    print(f"Written to {', '.join(str(target.relative_to(ROOT)) for target in written)}")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
