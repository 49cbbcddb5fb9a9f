"""Reports of benchmarks: a planted one through the real entry, and what a report is made of."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from definition import Definition
from gpu_clock import Row
from gpu_report import benchmark_name, claim_run, render_gpu_report
from history import ClaimRun, append_history, current_series, read_history
from machine import commit, describe_machine, versions
from report import claims_table, pictures_of, table, timings_section

PLANTED = '''
"""Sums beside a loop."""

import os
from pathlib import Path

import pytest

from shared.claims import Claim

PEERS = [{"peer": "a loop", "setting": "one thread", "why": "it has no other"}]


@pytest.mark.parametrize("size", [10, 1_000])
def bench_sum(benchmark, record_claim, size):
    benchmark.pedantic(sum, args=(range(size),), rounds=3)
    benchmark.extra_info["parts"] = [0.123456, 2.0]
    ours = float(os.environ["PLANTED_OURS"])
    record_claim(
        Claim(name=f"sum of {size}", unit="s", ours=ours, baseline=3.0, baseline_name="a loop",
              higher_is_better=False, correct=True, detail="same sum | bar"),
        aim=2.0,
        spread=(1.0, 4.0) if size == 10 else None,
    )
    if size == 10:
        store = Path(__file__).parents[1] / ".results"
        (store / "planted-tiny-sums.svg").write_text("<svg/>")
'''


def planted_yard(tmp_path, text=PLANTED):
    """A checkout's bench folder with one benchmark, planted/tiny."""
    (tmp_path / "bench/planted").mkdir(parents=True)
    for path in [*ROOT.glob("bench/*.py"), ROOT / "bench/pytest.ini"]:
        shutil.copyfile(path, tmp_path / "bench" / path.name)
    (tmp_path / "bench/planted/bench_tiny.py").write_text(text)
    return tmp_path


def bench(yard, *arguments, ours=1.0):
    # Beside other processes of tests the benchmark plugin would leave benchmarks out.
    outside = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    return subprocess.run(
        [sys.executable, yard / "bench/run.py", *arguments],
        cwd=yard,
        env={**outside, "PLANTED_OURS": str(ours)},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_kept_runs_are_appended_and_a_part_of_a_benchmark_keeps_the_rest(tmp_path):
    yard = planted_yard(tmp_path)
    results = yard / "bench/results"
    done = bench(yard, "planted/tiny", "--keep", ours=1.0)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (results / "planted-tiny.md").read_text()
    assert "# planted/tiny\n\nSums beside a loop.\n" in report
    assert "| command | `hatch run bench planted/tiny --keep` |" in report
    assert f"| machine | {describe_machine()} |" in report
    assert "Python 3." in report
    assert (
        "| sum of 10 | 1.00 s | 3.00 s (a loop) | 3.00x (1.00-4.00, 1 run) | correct; aim 2x met |"
        in report
    )
    assert (
        "| sum of 1000 | 1.00 s | 3.00 s (a loop) | 3.00x (1 run) | correct; aim 2x met |" in report
    )
    assert "| a loop | one thread | it has no other |" in report
    assert "parts = [0.123, 2.00]" in report
    assert "![planted-tiny-sums](planted-tiny-sums.svg)" in report
    assert (results / "planted-tiny-sums.svg").is_file()
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert max(row.replace("\\|", "").count("|") - 1 for row in rows) <= 5

    # A run of one claim, which misses its aim: the other claim stays, and the first run counts on.
    done = bench(yard, "planted", "--keep", "-k", "1000", ours=2.0)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (results / "planted-tiny.md").read_text()
    assert "| sum of 10 | 1.00 s | 3.00 s (a loop) | 3.00x (1.00-4.00, 1 run) |" in report
    assert (
        "| sum of 1000 | 2.00 s | 3.00 s (a loop) | 2.25x (1.50-3.00, 2 runs) "
        "| correct; aim 2x MISSED in 1 of 2 runs |" in report
    )
    runs = read_history(results / "history.jsonl")
    assert [run.name for run in runs] == ["sum of 10", "sum of 1000", "sum of 1000"]
    assert runs[2].command == "hatch run bench planted --keep -k 1000"


def test_without_keep_nothing_is_recorded(tmp_path):
    yard = planted_yard(tmp_path)
    done = bench(yard, "planted", "-k", "1000", ours=9.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.333x (1 run)" in done.stdout
    assert "0.333x (1 run)" in (yard / "bench/.results/latest.md").read_text()
    assert not (yard / "bench/results").exists()


def test_a_claim_of_turns_has_their_range(tmp_path):
    turns = (
        PLANTED.replace("ours=ours, baseline=3.0, ", "**pair_turns([1.0, 2.0], [3.0, 4.0]), ")
        .replace("higher_is_better=False, ", "")
        .replace("import Claim", "import Claim, pair_turns")
    )
    done = bench(planted_yard(tmp_path, turns), "planted", "--keep", "-k", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2.50x (2.00-3.00, 1 run)" in done.stdout


def test_a_claim_that_is_wrong_or_recorded_twice_fails_and_is_kept(tmp_path):
    twice = PLANTED.replace("sum of {size}", "sum").replace("correct=True", "correct=size > 10")
    yard = planted_yard(tmp_path, twice)
    done = bench(yard, "planted", "--keep")
    assert done.returncode == 1
    assert "sum against a loop: recorded twice" in done.stdout
    report = (yard / "bench/results/planted-tiny.md").read_text()
    assert "| 3.00x (1.00-4.00, 1 run, 1 NOT CORRECT) | NOT CORRECT; aim 2x met |" in report


def test_unknown_benchmark_is_refused(tmp_path):
    done = bench(planted_yard(tmp_path), "planted/huge")
    assert done.returncode == 2
    assert "expected some of ['planted', 'planted/tiny'], got ['planted/huge']" in done.stderr


def test_definition_is_read_without_running(tmp_path):
    path = tmp_path / "bench_some.py"
    path.write_text(
        '"""What is measured."""\nimport numpy as np\nfrom beside import x\nREVISION = 3\n'
        'it = peer("trl", 1)\nray = pytest.importorskip("ray.data")\nraise SystemExit\n'
    )
    (tmp_path / "beside.py").write_text("import torch.nn, bench_some\n")
    found = Definition(path)
    assert (found.about, found.revision, found.peers) == ("What is measured.", 3, [])
    assert found.imported_modules() == {"numpy", "ray", "torch"}
    assert found.started_peers() == {"trl"}
    told = versions(found, ROOT)
    assert told["trl"] in (ROOT / "bench/peers/trl.txt").read_text()
    assert list(told)[:3] == ["Python", "torch", "numpy"]
    assert Definition(tmp_path / "gone.py").revision == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("REVISION = 0", "REVISION: expected a whole number from 1, got 0"),
        ("REVISION = f()", "REVISION: expected a literal"),
        ("PEERS = [{'peer': 'x'}]", "PEERS: expected a list of dictionaries with peer, setting"),
    ],
)
def test_definition_that_does_not_read_is_refused(tmp_path, line, message):
    path = tmp_path / "bench_some.py"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        _ = (Definition(path).revision, Definition(path).peers)


def test_every_benchmark_of_the_yard_reads():
    for path in ROOT.glob("bench/*/bench_*.py"):
        definition = Definition(path)
        assert definition.about, f"{path}: expected a docstring, which reports begin with"
        assert definition.revision >= 1
        assert all(row.peer and row.setting and row.why for row in definition.peers)


def test_picture_belongs_to_the_longest_name(tmp_path):
    for name in ("zeta-tiny", "zeta-tiny-a", "zeta-tiny_two-b", "zeta-other", "zeta-tinyx"):
        (tmp_path / f"{name}.svg").write_text("<svg/>")
    names = ["zeta-tiny", "zeta-tiny-a", "zeta-tiny_two"]
    assert [path.stem for path in pictures_of("zeta-tiny", names, tmp_path)] == ["zeta-tiny"]
    assert [p.stem for p in pictures_of("zeta-tiny_two", names, tmp_path)] == ["zeta-tiny_two-b"]


def test_cells_cannot_break_a_table():
    assert table(("a", "b"), [("1|2", "x\ny")]) == "| a | b |\n| --- | --- |\n| 1\\|2 | x y |"


def test_commit_is_unknown_without_git(tmp_path):
    assert commit(tmp_path) == "unknown"


def test_kernels_on_a_gpu_go_into_the_same_history(tmp_path):
    row = Row(
        kernel="gather",
        shape="7 x 3",
        median_s=2e-3,
        low_s=1e-3,
        high_s=3e-3,
        bytes_moved=4_000_000,
        copy_bytes_per_s=4e9,
        correct=True,
    )
    beside = replace(row, baseline="torch", baseline_s=5e-3, note="9 MB at most")
    told = {
        "command": "hatch run bench-gpu",
        "commit": "0",
        "date": "2026-01-02T03:04+00:00",
        "machine": "NVIDIA H200",
        "versions": {"torch": "2"},
        "revision": 1,
    }
    name = benchmark_name("NVIDIA H200")
    path = tmp_path / "history.jsonl"
    append_history(path, [claim_run(one, told, name) for one in (row, beside)])
    alone, against = current_series(read_history(path))
    assert alone.newest.benchmark == "gpu-nvidia-h200"
    assert (alone.title, alone.ratios) == (
        "gather, 7 x 3 against a device copy in the same turns",
        [0.5],
    )
    assert (against.title, against.ratios) == ("gather, 7 x 3 against torch", [2.5])
    text = render_gpu_report("NVIDIA H200", [row, beside], told, "3 passed", 12.0)
    assert "| gather, 7 x 3 | 2.00 (1.00 to 3.00) | 2.00 (50%) |  | yes |" in text
    assert (
        "| gather, 7 x 3; 9 MB at most | 2.00 (1.00 to 3.00) | 2.00 (50%) | 2.50x torch | yes |"
        in text
    )
    assert json.loads(path.read_text().splitlines()[0])["machine"] == "NVIDIA H200"


def test_claim_of_an_older_run_is_dated():
    fields = dict.fromkeys(("package", "benchmark", "detail", "source", "command", "commit"), "")
    fields |= {"revision": 1, "unit": "s", "ours": 1.0, "baseline": 2.0, "baseline_name": "a loop"}
    fields |= {
        "higher_is_better": False,
        "ratio": 2.0,
        "spread": None,
        "correct": True,
        "aim": None,
    }
    fields |= {"kind": "measured", "machine": "", "versions": {}}
    dates = {"old": "2026-01-02T03:04+00:00", "new": "2026-01-03T00:00+00:00"}
    runs = [ClaimRun(name=name, date=date, **fields) for name, date in dates.items()]
    _, _, old, new = claims_table(current_series(runs), dates["new"]).splitlines()
    assert old.endswith("| correct; run of 2026-01-02 |")
    assert new.endswith("| correct |")


def test_timings_are_compared_with_the_fastest_of_their_group():
    def row(name, median, group):
        stats = {"median": median, "iqr": 0.0, "rounds": 3}
        return {"name": name, "group": group, "stats": stats, "extra_info": {}}

    text = timings_section(
        [row("slow", 3.0, "sums"), row("fast", 2.0, "sums"), row("one", 1.0, None)]
    )
    assert [line.split(" | ")[1] for line in text.splitlines()[2:]] == ["one", "fast", "slow"]
    assert [line.split(" | ")[-1] for line in text.splitlines()[2:]] == [" |", "1.00 |", "1.50 |"]
