"""Figures in READMEs and pages stand in recorded runs: the yard's own, and planted cases."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from figures import command_of, figures_without_run, find_claim, measured_page, pages_of
from history import ClaimRun, append_history, current_series, read_history

RUNS = read_history(ROOT / "bench/results/history.jsonl")
SERIES = current_series(RUNS)
PAGES = pages_of(ROOT)


def figures(*arguments, root=ROOT):
    return subprocess.run(
        [sys.executable, ROOT / "tools/figures.py", *arguments, "--root", root],
        check=False,
        capture_output=True,
        text=True,
    )


def missing_claims(root):
    """Recorded claims that have no row in their package's page."""
    found = []
    for one in current_series(read_history(root / "bench/results/history.jsonl")):
        page, run = measured_page(one.newest.package, root), one.newest
        rows = page.read_text().splitlines() if page.is_file() else []
        escaped = [" ".join(t.split()).replace("|", "\\|") for t in (run.name, run.baseline_name)]
        if not any(row.startswith(f"| {escaped[0]}") and escaped[1] in row for row in rows):
            found.append(one.title)
    return found


def test_pages_show_what_is_recorded():
    done = figures("--check")
    assert done.returncode == 0, done.stderr


def test_no_recorded_claim_is_missing():
    assert missing_claims(ROOT) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_stands_without_a_run(page):
    """Ratios ("2.8x") of every README and page, outside marks too, are a recorded run's, rounded."""
    assert figures_without_run(page.read_text(), PAGES[page], SERIES) == []


def run_of(**changes):
    run = ClaimRun(
        package="zeta",
        benchmark="tiny",
        revision=1,
        name="a sum",
        unit="s",
        ours=1.0,
        baseline=2.0,
        baseline_name="a loop",
        higher_is_better=False,
        ratio=2.0,
        spread=None,
        correct=True,
        kind="measured",
        aim=None,
        detail="",
        source="",
        command="hatch run bench zeta",
        commit="0123456789",
        date="2026-01-02T03:04+00:00",
        machine="a machine",
        versions={"torch": "2"},
    )
    return replace(run, **changes)


README = """\
# zeta

Sums are <!-- ratio tiny: a sum against a loop -->?<!-- end --> faster.

<!-- claims -->
<!-- end -->
"""
CHOSEN = "tiny: a sum against a loop | summing | the loop\ntiny: products\n"


@pytest.fixture
def yard(tmp_path):
    """A checkout of one package with two runs of one claim, one of another, and a README."""
    (tmp_path / "packages/zeta").mkdir(parents=True)
    (tmp_path / "packages/zeta/README.md").write_text(README)
    (tmp_path / "README.md").write_text(
        "| zeta | <!-- range zeta/tiny: products --><!-- end --> |\n"
    )
    (tmp_path / "bench/zeta").mkdir(parents=True)
    (tmp_path / "bench/zeta/readme_claims.txt").write_text(CHOSEN)
    (tmp_path / "bench/zeta/bench_tiny.py").write_text(
        '"""Sums."""\nPEERS = [{"peer": "a loop", "setting": "tight", "why": "nothing else"}]\n'
    )
    runs = [run_of(ratio=2.4), run_of(ratio=3.1), run_of(name="a sum of two"), LOST]
    append_history(tmp_path / "bench/results/history.jsonl", runs)
    return tmp_path


LOST = run_of(name="a product", baseline_name="products|others", ratio=0.5, kind="simulated")


def test_pages_are_filled_and_stay_as_they_are(yard):
    assert figures("--check", root=yard).returncode == 1
    done = figures(root=yard)
    assert done.returncode == 0, done.stderr
    text = (yard / "packages/zeta/README.md").read_text()
    assert "tiny: a sum against a loop -->2.75x<!-- end --> faster" in text
    assert (
        "| summing | 2.75x (2.40-3.10, 2 runs) | the loop | `hatch run bench zeta/tiny` |" in text
    )
    assert "| a product (simulated) | 0.500x (1 run) | products\\|others |" in text
    assert "products -->0.500x (1 run)<!-- end --> |" in (yard / "README.md").read_text()
    page = (yard / "packages/zeta/docs/measured.md").read_text()
    assert page.startswith("# zeta: what is measured\n")
    assert "## tiny\n\nSums.\n" in page
    assert "| a sum | 1.00 s | 2.00 s (a loop) | 2.75x (2.40-3.10, 2 runs) | correct |" in page
    assert "| a loop | tight | nothing else |" in page
    assert missing_claims(yard) == []
    assert figures("--check", root=yard).returncode == 0
    assert figures(root=yard).stdout == "", "filling again changes nothing"


def test_rows_of_a_benchmark_without_a_run_are_left_out_by_name(yard):
    (yard / "bench/zeta/bench_later.py").write_text('"""Later."""\n')
    page, chosen = yard / "packages/zeta/README.md", yard / "bench/zeta/readme_claims.txt"
    chosen.write_text(CHOSEN.replace("tiny: products", "later: products"))
    done = figures(root=yard)
    assert done.returncode == 0, done.stderr
    assert "left out of a table of zeta: 'later: products'" in done.stdout
    assert page.read_text().count("hatch run bench zeta/tiny") == 1
    chosen.write_text("later: products\n")
    assert figures(root=yard).returncode == 0
    assert "-->\n\nNo run is recorded in this form yet.\n\n<!-- end -->" in page.read_text()
    # Of a benchmark that is nowhere, and within a sentence, a key is an error.
    chosen.write_text("never: products\n")
    assert figures(root=yard).returncode == 1
    page.write_text("# zeta\n\nx <!-- ratio later: products --><!-- end -->\n")
    assert figures(root=yard).returncode == 1


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "2.75x (2.40", "2.95x (2.40"),
        ("README.md", "-->2.75x", "-->2.95x"),
        ("docs/measured.md", "0.500x", "1.50x"),
    ],
)
def test_figure_changed_by_hand_is_found(yard, page, old, new):
    assert figures(root=yard).returncode == 0
    path = yard / "packages/zeta" / page
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = figures("--check", root=yard)
    assert done.returncode == 1
    assert f"packages/zeta/{page}: differs" in done.stderr


def test_run_recorded_later_is_missing_until_pages_are_filled(yard):
    assert figures(root=yard).returncode == 0
    append_history(yard / "bench/results/history.jsonl", [run_of(name="a later claim")])
    assert missing_claims(yard) == ["a later claim against a loop"]
    done = figures("--check", root=yard)
    assert done.returncode == 1
    assert "packages/zeta/docs/measured.md: differs" in done.stderr
    assert figures(root=yard).returncode == 0
    assert missing_claims(yard) == []


def test_row_taken_out_of_the_page_is_missing(yard):
    assert figures(root=yard).returncode == 0
    page = yard / "packages/zeta/docs/measured.md"
    page.write_text(re.sub(r"\| a product .*\n", "", page.read_text()))
    assert missing_claims(yard) == ["a product against products|others"]
    assert figures("--check", root=yard).returncode == 1


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("<!-- ratio tiny: nothing -->", "expected one claim, got 0 of"),
        (
            "<!-- ratio tiny: sum -->",
            "got 2 of\n  tiny: a sum against a loop\n  tiny: a sum of two",
        ),
        ("<!-- ratio large: sum -->", "expected a recorded benchmark of zeta: ['tiny']"),
        ("<!-- ratio eta/tiny: sum -->", "expected a recorded benchmark of eta: []"),
        ("<!-- ratio tiny -->", "expected 'benchmark: words'"),
        ("<!-- ratio tiny: product -->\n<!-- measured -->", "before the next"),
        ("<!-- claims\ntiny: product\n-->", "its keys in readme_claims.txt, got 'tiny: product'"),
    ],
)
def test_mark_that_cannot_be_filled_names_what_it_could_be(yard, mark, message):
    page = yard / "packages/zeta/README.md"
    page.write_text(f"{mark}<!-- end -->\n")
    done = figures(root=yard)
    assert done.returncode == 1
    assert "packages/zeta/README.md: " in done.stderr
    assert message in done.stderr
    assert page.read_text() == f"{mark}<!-- end -->\n"
    # The other pages are filled all the same.
    assert "0.500x" in (yard / "README.md").read_text()


def test_six_claims_are_chosen_at_most(yard):
    page, chosen = yard / "packages/zeta/README.md", yard / "bench/zeta/readme_claims.txt"
    chosen.write_text("tiny: product\n" * 6)
    done = figures(root=yard)
    assert done.returncode == 0, done.stderr
    assert page.read_text().count("| a product (simulated) | 0.500x") == 6
    chosen.write_text("tiny: product\n" * 7)
    done = figures(root=yard)
    assert done.returncode == 1
    assert "readme_claims.txt: expected at most 6 rows, got 7" in done.stderr
    chosen.unlink()
    done = figures(root=yard)
    assert done.returncode == 1
    assert "bench/zeta/readme_claims.txt: expected a key and its labels a line" in done.stderr


def test_whole_name_is_the_claim_though_others_begin_with_it():
    series = current_series([run_of(), run_of(name="a sum of two")])
    assert find_claim("tiny: A sum", "zeta", series, ROOT).newest.name == "a sum"
    assert find_claim("zeta/tiny: of two", "", series, ROOT).newest.name == "a sum of two"


def test_command_runs_the_benchmark_again():
    (tiny,) = current_series([run_of()])
    assert command_of(tiny) == "`hatch run bench zeta/tiny`"
    (on_gpu,) = current_series([run_of(package="shared", benchmark="gpu-nvidia-h200")])
    assert command_of(on_gpu) == "`hatch run bench-gpu`"


def test_mark_without_end_is_refused(yard):
    page = yard / "packages/zeta/README.md"
    page.write_text("<!-- ratio tiny: product -->\n")
    done = figures(root=yard)
    assert (done.returncode, "expected <!-- end --> after each mark" in done.stderr) == (1, True)


def test_page_of_all_claims_needs_its_mark(yard):
    (yard / "packages/zeta/docs").mkdir()
    (yard / "packages/zeta/docs/measured.md").write_text("# By hand\n")
    done = figures(root=yard)
    assert done.returncode == 1
    assert "packages/zeta/docs/measured.md: expected <!-- measured -->" in done.stderr


def test_figures_outside_marks_must_be_recorded():
    series = current_series(
        [run_of(ratio=r) for r in (2.4, 3.1)]
        + [run_of(package="eta", ratio=371.4), run_of(package="cross", ratio=1_234.0)]
    )
    text = """2.4x, 3.1x and 2.75x, 3x on 128x128 and 0x1f; 1,230x and 1234x
    <!-- ratio tiny: a sum -->99x<!-- end --> and 2.5x, 371x, 0.9x"""
    assert figures_without_run(text, "zeta", series) == ["2.5x", "371x", "0.9x"]
    assert figures_without_run(text, "", series) == ["2.5x", "0.9x"]


def test_list_prints_what_a_key_can_name(yard):
    lines = figures("--list", root=yard).stdout.splitlines()
    assert lines[0] == "zeta/tiny: a sum against a loop = 2.75x (2.40-3.10, 2 runs)"
    assert len(lines) == 3
