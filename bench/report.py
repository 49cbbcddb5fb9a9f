"""One benchmark's report: bench/results/<package>-<benchmark>.md, replaced by each newer run.

Claims come from the history, so that a run of a part of the benchmark leaves the other claims in
the report. Timings are of the newest run alone: what shares a group compares within one run only.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from definition import Definition, PeerSetting
from history import Series, format_number
from shared.units import format_s

__all__ = [
    "RATIOS",
    "claims_table",
    "header",
    "peers_table",
    "pictures_of",
    "render_report",
    "report_path",
    "run_table",
    "table",
    "timings_section",
]

RATIOS = (
    "A ratio above 1 means that ours is better; it is the median of all runs with their range. "
    "Other figures are of the newest run."
)


def report_path(results: Path, package: str, benchmark: str) -> Path:
    """Returns where a benchmark's report lies."""
    return results / f"{package}-{benchmark}.md"


def render_report(
    title: str,
    definition: Definition,
    run: dict[str, str],
    series: Sequence[Series],
    timings: Sequence[dict[str, Any]],
    pictures: Iterable[Path],
) -> str:
    """Writes the Markdown of one benchmark.

    Args:
        title: package and benchmark.
        definition: the benchmark's file.
        run: what the header lists of the newest run, by label.
        series: the benchmark's claims.
        timings: pytest-benchmark's rows of the newest run.
        pictures: files that lie beside the report.
    """
    parts = [f"# {title}", definition.about, run_table(run)]
    if series:
        newest = max(one.newest.date for one in series)
        parts += ["## Claims", RATIOS, claims_table(series, newest)]
        details = [f"- {one.title}: {one.newest.detail}" for one in series if one.newest.detail]
        parts += ["How each was checked:", "\n".join(details)] if details else []
    if definition.peers:
        parts += ["## Settings of the peers", peers_table(definition.peers)]
    if timings:
        parts += ["## Timings of the newest run", timings_section(timings)]
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(part for part in parts if part) + "\n"


def header(told: dict[str, str], versions: dict[str, str]) -> dict[str, str]:
    """Returns what a header lists of a run, by label.

    Args:
        told: machine, date, command and commit.
        versions: by distribution.
    """
    return {
        "machine": told["machine"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "date": told["date"].replace("T", " "),
        "command": f"`{told['command']}`",
        "commit": told["commit"],
    }


def run_table(run: dict[str, str]) -> str:
    """Writes the header's table: machine, versions, date, command, commit."""
    return table(("run", ""), run.items())


def claims_table(series: Iterable[Series], newest: str = "") -> str:
    """Writes claims with both figures; a run before `newest` is dated."""
    rows = []
    for one in series:
        run = one.newest
        simulated = " (simulated)" if run.kind == "simulated" else ""
        older = f"; run of {run.date[:10]}" if newest and run.date < newest else ""
        rows.append(
            (
                run.name + simulated,
                f"{format_number(run.ours)} {run.unit}",
                f"{format_number(run.baseline)} {run.unit} ({run.baseline_name})",
                one.ratio_text(),
                one.outcome() + older,
            )
        )
    return table(("claim", "ours", "baseline", "ratio", "outcome"), rows)


def peers_table(peers: Iterable[PeerSetting]) -> str:
    """Writes the peers' settings."""
    rows = [(row.peer, row.setting, row.why) for row in peers]
    return table(("peer", "setting", "why it is the peer's best"), rows)


def timings_section(timings: Iterable[dict[str, Any]]) -> str:
    """Writes timings by group, and what the benchmarks noted beside them."""
    timings = sorted(timings, key=lambda row: (row["group"] or "", row["name"]))
    fastest: dict[str | None, float] = {}
    for row in timings:
        seconds = row["stats"]["median"]
        fastest[row["group"]] = min(seconds, fastest.get(row["group"], seconds))
    rows = [
        (
            row["group"] or "",
            row["name"],
            f"{format_s(row['stats']['median'])} ({format_s(row['stats']['iqr'])})",
            str(row["stats"]["rounds"]),
            format_number(row["stats"]["median"] / fastest[row["group"]]) if row["group"] else "",
        )
        for row in timings
    ]
    heads = ("group", "benchmark", "median (IQR)", "rounds", "times the group's fastest")
    notes = [
        f"- {row['name']}: "
        + "; ".join(f"{key} = {_note(value)}" for key, value in row["extra_info"].items())
        for row in timings
        if row["extra_info"]
    ]
    return "\n\n".join([table(heads, rows), *(["\n".join(notes)] if notes else [])])


def _note(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_note(each)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(_note, value))}]"
    return format_number(value) if isinstance(value, float) else str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a Markdown table; bars and line breaks within cells are made harmless."""

    def line(cells: Iterable[str]) -> str:
        whole = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(whole)} |"

    return "\n".join([line(heads), line("---" for _ in heads), *map(line, rows)])


def pictures_of(name: str, names: Iterable[str], folder: Path) -> list[Path]:
    """Returns the pictures in a folder that belong to a benchmark.

    Args:
        name: the benchmark, as "gnnflow-year": its pictures are `gnnflow-year*.svg`.
        names: all benchmarks; the longest name that fits a picture owns it.
        folder: where to look.
    """
    found = []
    for path in sorted(folder.glob("*.svg")):
        owners = [n for n in names if path.stem == n or path.stem.startswith(f"{n}-")]
        if owners and max(owners, key=len) == name:
            found.append(path)
    return found
