"""Runs the benchmarks and writes one table over everything that ran.

`hatch run bench [packages]` runs bench/<package>/bench_*.py of the named packages; none named: all,
bench/cross included. Options of pytest, `-k` and the like, may follow. The table lists claims
(ours beside a baseline from the same run) and then every timing, by group; it goes to the terminal
and to bench/.results/latest.md, and with `--keep` to a dated file in bench/results, with the pictures
that the benchmarks drew.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.units import format_s

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
NOTHING_COLLECTED = 5


def folders(names: list[str]) -> list[Path]:
    """Returns the folders to run; exits with status 2 for a name that has none."""
    known = {path.parent.name: path.parent for path in sorted(ROOT.glob("bench/*/bench_*.py"))}
    missing = [name for name in names if name not in known]
    if missing:
        print(f"bench: expected some of {sorted(known)}, got {missing}", file=sys.stderr)
        raise SystemExit(2)
    return [known[name] for name in names or known]


def run(paths: Iterable[Path], options: list[str], store: Path) -> tuple[int, dict, list[dict]]:
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
    return done.returncode, _read(timings, {}), _read(claims, [])


def _read(path: Path, empty: Any) -> Any:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return json.loads(text) if text else empty


def table(timings: dict, claims: list[dict], command: str) -> str:
    """Writes the Markdown that holds all results of one run."""
    now = datetime.datetime.now().astimezone()
    machine = timings.get("machine_info", {})
    processor = machine.get("cpu", {}).get("brand_raw") or platform.machine()
    lines = [
        f"# Benchmarks, {now:%Y-%m-%d %H:%M}",
        "",
        (
            f"{platform.node()}: {processor}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}. Commit {timings.get('commit_info', {}).get('id', '?')[:10]}. "
            f"Command: `{command}`."
        ),
    ]
    if claims:
        lines += [
            "",
            "| claim | ours | baseline | ratio | aim | kind | correct |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_claim_row(claim) for claim in claims]
    rows = sorted(timings.get("benchmarks", []), key=lambda row: (row["group"] or "", row["name"]))
    if rows:
        lines += [
            "",
            "| group | benchmark | median | spread (IQR) | rounds | times the group's fastest | notes |",
            "|---|---|---|---|---|---|---|",
        ]
        fastest: dict[str | None, float] = {}
        for row in rows:
            median = row["stats"]["median"]
            fastest[row["group"]] = min(median, fastest.get(row["group"], median))
        lines += [_timing_row(row, fastest[row["group"]]) for row in rows]
    return "\n".join(lines) + "\n"


def _claim_row(claim: dict) -> str:
    ratio, aim = "not finite" if claim["ratio"] is None else f"{claim['ratio']:.2f}x", ""
    if claim["aim"] is not None:
        is_met = claim["ratio"] is not None and claim["ratio"] >= claim["aim"]
        aim = f"{claim['aim']:g}x, {'met' if is_met else 'MISSED'}"
    return (
        f"| {claim['name']} | {claim['ours']:.4g} {claim['unit']} | {claim['baseline']:.4g} "
        f"{claim['unit']} ({claim['baseline_name']}) | {ratio} | {aim} | {claim['kind']} | "
        f"{'yes' if claim['correct'] else 'NO'} |"
    )


def _timing_row(row: dict, fastest: float) -> str:
    stats = row["stats"]
    notes = ", ".join(f"{key}={value}" for key, value in row["extra_info"].items())
    return (
        f"| {row['group'] or ''} | {row['name']} | {format_s(stats['median'])} | "
        f"{format_s(stats['iqr'])} | {stats['rounds']} | {stats['median'] / fastest:.2f} | {notes} |"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks and returns the exit status."""
    parser = argparse.ArgumentParser(prog="hatch run bench", description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", help="folders of bench/; none named: all")
    parser.epilog = "What follows, from the first other option on, goes to pytest: -k epoch"
    parser.add_argument(
        "--keep", action="store_true", help="also write a dated table to bench/results"
    )
    given = sys.argv[1:] if argv is None else argv
    ours = {"--keep", "-h", "--help"}
    others = (at for at, word in enumerate(given) if word.startswith("-") and word not in ours)
    split = next(others, len(given))
    arguments, options = parser.parse_args(given[:split]), given[split:]
    paths = folders(arguments.packages)
    if not paths:
        print("bench: no benchmarks here yet")
        return 0
    status, timings, claims = run(paths, options, ROOT / "bench/.results")
    if status == NOTHING_COLLECTED:
        print("bench: the options left nothing to run", file=sys.stderr)
        return 2
    text = table(timings, claims, f"hatch run bench {shlex.join(given)}")
    targets = [ROOT / "bench/.results/latest.md"]
    if arguments.keep:
        asked = re.findall(r"\w+", " ".join(word for word in options if not word.startswith("-")))
        names = "-".join([path.name for path in paths] + asked)
        targets.append(ROOT / f"bench/results/{datetime.date.today():%Y-%m-%d}-{names}.md")
        for picture in sorted((ROOT / "bench/.results").glob("*.svg")):
            kept = ROOT / f"bench/results/{datetime.date.today():%Y-%m-%d}-{picture.name}"
            text += f"\n![{picture.stem}]({kept.name})\n"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, kept)
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {', '.join(str(target.relative_to(ROOT)) for target in targets)}")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
