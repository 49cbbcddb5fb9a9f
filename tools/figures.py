"""Writes the recorded figures of benchmarks into READMEs and pages: between marks, from the history.

`python tools/figures.py` rewrites these marks' contents in the READMEs and in docs/ of the root, of
shared, of each package and in bench/cross; `--check` writes nothing and exits with 1 when a page
differs; `--list` prints every claim that a key can name, with its figure.

    <!-- claims --> (the package's chosen claims: claim, figure, against, command) <!-- end -->

    <!-- measured --> (all claims of the package, complete) <!-- end -->

    ... in <!-- ratio year: TGAT seconds -->2.81x<!-- end --> less time
    ... in <!-- range year: TGAT seconds -->2.81x (2.62-3.30, 4 runs)<!-- end --> less time

A key is `benchmark: words`, or `package/benchmark: words` from outside the package. The words stand
in this order in the claim's name or in "name against baseline", and in no other claim of that
benchmark; a claim's whole name also names it. No line begins with a mark of `ratio` or `range`:
Markdown would take the whole line for HTML.

A package's chosen claims stand in bench/<package>/readme_claims.txt, at most six:

    cache: 5 % of the rows, one hop | edge rows found in a cache | Belady's bound

What follows a key, after bars, replaces the claim's name and its baseline's; both may be left out. A
row whose benchmark has no recorded run yet is left out of the table, and the command names it.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from definition import Definition
from history import Series, current_series, format_number, read_history
from report import RATIOS, claims_table, peers_table, report_path, table

__all__ = ["figures_without_run", "main"]

MOST_ROWS = 6
MARK = re.compile(r"<!-- (claims|measured|ratio|range)\b(.*?)-->(.*?)<!-- end -->", re.DOTALL)
OPENING = re.compile(r"<!-- (?:claims|measured|ratio|range)\b")
NEW_PAGE = "# {}: what is measured\n\n<!-- measured -->\n<!-- end -->\n"


NO_RUN = "No run is recorded in this form yet."


class MarkError(Exception):
    """A mark that cannot be filled; the text says why."""


class NotRecordedError(MarkError):
    """A benchmark that is there, of which no run is recorded yet."""


def home_of(package: str, root: Path) -> Path:
    """Returns the folder whose docs/ hold a package's page; bench/cross has no other home."""
    if package == "shared":
        return root / "shared"
    home = root / "packages" / package
    return home if home.is_dir() else root / "bench" / package


def measured_page(package: str, root: Path) -> Path:
    """Returns where the page with all claims of a package lies."""
    return home_of(package, root) / "docs/measured.md"


def pages_of(root: Path) -> dict[Path, str]:
    """Returns all pages that may hold marks, with the package they belong to, "" for the root's."""
    homes = [root, root / "shared", *sorted(root.glob("packages/*")), *sorted(root.glob("bench/*"))]
    return {
        page: "" if home == root else home.name
        for home in homes
        for page in [home / "README.md", *sorted(home.glob("docs/*.md"))]
        if page.is_file()
    }


def words_of(text: str) -> str:
    """Returns a text's words in lower case, single spaces around each."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def find_claim(key: str, package: str, series: Iterable[Series], root: Path) -> Series:
    """Returns the one claim that a key names.

    Args:
        key: "benchmark: words" or "package/benchmark: words".
        package: what the page belongs to.
        series: all claims.
        root: the checkout, whose bench/ says which benchmarks there are.

    Raises:
        NotRecordedError: when no run of the benchmark is recorded.
        MarkError: when the key names none or several; the text lists those that it could name.
    """
    place, colon, text = key.partition(":")
    owner, _, benchmark = place.strip().rpartition("/")
    owner, words = owner or package, words_of(text)
    if not (colon and owner and words.strip()):
        raise MarkError(
            f"{key.strip()!r}: expected 'benchmark: words', or 'package/benchmark: words' from "
            "outside a package"
        )
    series = [one for one in series if one.newest.package == owner]
    known = sorted({one.newest.benchmark for one in series})
    if benchmark not in known and (root / f"bench/{owner}/bench_{benchmark}.py").is_file():
        raise NotRecordedError(f"{key.strip()!r}: no run is recorded; hatch run bench --keep")
    if benchmark not in known:
        raise MarkError(f"{key.strip()!r}: expected a recorded benchmark of {owner}: {known}")
    series = [one for one in series if one.newest.benchmark == benchmark]
    whole = [one for one in series if words in (words_of(one.newest.name), words_of(one.title))]
    found = whole or [one for one in series if words in words_of(one.title)]
    if len(found) != 1:
        could = "\n".join(f"  {one.newest.benchmark}: {one.title}" for one in found or series)
        raise MarkError(f"{key.strip()!r}: expected one claim, got {len(found)} of\n{could}")
    return found[0]


def command_of(one: Series) -> str:
    """Returns the command that runs a claim's benchmark again."""
    run = one.newest
    if run.benchmark.startswith("gpu-"):
        return "`hatch run bench-gpu`"
    return f"`hatch run bench {run.package}/{run.benchmark}`"


def chosen_table(package: str, series: list[Series], root: Path) -> str:
    """Writes the table of those chosen claims of a package that are recorded.

    Raises:
        MarkError: when no claims are chosen, or more than `MOST_ROWS`, or a key names none or several.
    """
    file = root / f"bench/{package}/readme_claims.txt"
    if not file.is_file():
        raise MarkError(
            f"{file.relative_to(root)}: expected a key and its labels a line, got no file; write it "
            "(--list prints the keys)"
        )
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) > MOST_ROWS:
        raise MarkError(
            f"{file.relative_to(root)}: expected at most {MOST_ROWS} rows, got {len(lines)}"
        )
    rows = []
    for line in lines:
        key, *labels = (part.strip() for part in line.split("|"))
        try:
            one = find_claim(key, package, series, root)
        except NotRecordedError as error:
            print(f"figures: left out of a table of {package}: {error}")
            continue
        name, against = (*labels, "", "")[:2]
        simulated = " (simulated)" if one.newest.kind == "simulated" else ""
        rows.append(
            (
                (name or one.newest.name) + simulated,
                one.ratio_text(),
                against or one.newest.baseline_name,
                command_of(one),
            )
        )
    return table(("claim", "figure", "against", "command"), rows) if rows else NO_RUN


def measured_text(package: str, series: list[Series], page: Path, root: Path) -> str:
    """Writes all claims of a package, benchmark by benchmark."""
    parts = [RATIOS if series else NO_RUN]
    for benchmark in sorted({one.newest.benchmark for one in series}):
        of_it = [one for one in series if one.newest.benchmark == benchmark]
        file = root / f"bench/{package}/bench_{benchmark}.py"
        if benchmark.startswith("gpu-"):
            file = root / "bench/gpu.py"
        definition = Definition(file)
        last = max((one.newest for one in of_it), key=lambda run: run.date)
        parts += [f"## {benchmark}", definition.about, claims_table(of_it, last.date)]
        if definition.peers:
            parts += [peers_table(definition.peers)]
        told = f"Newest run: {last.date[:10]}, {last.machine}, commit {last.commit}; {command_of(of_it[0])}."
        report = report_path(root / "bench/results", package, benchmark)
        if report.is_file():
            link = os.path.relpath(report, page.parent)
            told += f" [Report]({link})."
        parts.append(told)
    return "\n\n".join(part for part in parts if part)


def filled(text: str, page: Path, package: str, series: list[Series], root: Path) -> str:
    """Returns a page's text with all marks filled.

    Raises:
        MarkError: when a mark cannot be filled.
    """

    def fill(match: re.Match) -> str:
        kind, asked, body = match.groups()
        if kind == "claims":
            if asked.strip() or not package:
                raise MarkError(
                    "expected <!-- claims --> in a package's page, its keys in readme_claims.txt, got "
                    f"{asked.strip() or 'the root'!r}"
                )
            body = f"\n\n{chosen_table(package, series, root)}\n\n"
        elif kind == "measured":
            mine = [one for one in series if one.newest.package == package]
            body = f"\n\n{measured_text(package, mine, page, root)}\n\n"
        else:
            body = find_claim(asked, package, series, root).ratio_text(with_range=kind == "range")
        return f"<!-- {kind}{asked}-->{body}<!-- end -->"

    if len(OPENING.findall(text)) > len(MARK.findall(text)):
        raise MarkError("expected <!-- end --> after each mark, before the next")
    return MARK.sub(fill, text)


def figures_without_run(text: str, package: str, series: Iterable[Series]) -> list[str]:
    """Returns ratios, as "2.8x", that stand outside marks and in no recorded run.

    Args:
        text: a page.
        package: what the page belongs to, "" for the root's, which may state any package's.
        series: all claims. A figure stands in a run when the run's ratio, or the median of a
            claim's runs, rounds to it.
    """
    recorded = [
        ratio
        for one in series
        if package in ("", one.newest.package) or one.newest.package == "cross"
        for ratio in [*one.ratios, *([median(one.ratios)] if one.ratios else [])]
    ]
    found = []
    for figure in re.findall(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)x(?!\w)", MARK.sub("", text)):
        digits = len(figure.partition(".")[2])
        if not any(
            figure in (f"{ratio:,.{digits}f}", f"{ratio:.{digits}f}", format_number(ratio))
            for ratio in recorded
        ):
            found.append(f"{figure}x")
    return found


def main(argv: list[str] | None = None) -> int:
    """Fills the pages, or checks them, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 on change")
    parser.add_argument("--list", action="store_true", help="print the claims that a key can name")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    series = current_series(read_history(root / "bench/results/history.jsonl"))
    if arguments.list:
        for one in series:
            run = one.newest
            print(f"{run.package}/{run.benchmark}: {one.title} = {one.ratio_text()}")
        return 0
    pages = pages_of(root)
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    problems = []
    for package in sorted({one.newest.package for one in series}):
        page = measured_page(package, root)
        pages.setdefault(page, package)
        if "<!-- measured -->" not in texts.setdefault(page, NEW_PAGE.format(package)):
            problems.append(f"{page.relative_to(root)}: expected <!-- measured --> <!-- end -->")
    for page, package in pages.items():
        try:
            text = filled(texts[page], page, package, series, root)
        except (MarkError, ValueError) as error:
            problems.append(f"{page.relative_to(root)}: {error}")
            continue
        if page.is_file() and text == page.read_text(encoding="utf-8"):
            continue
        if arguments.check:
            problems.append(f"{page.relative_to(root)}: differs; hatch run figures")
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
            print(f"figures: wrote {page.relative_to(root)}")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
