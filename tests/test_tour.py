"""The tour's real entry on a planted package, in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = """
import sys
from pathlib import Path
from shared.claims import Claim, write_demo

out = Path(sys.argv[sys.argv.index("--out") + 1])
claims = [
    Claim(name=f"time {{n}}", unit="s", ours=1.0, baseline=2.0 + n, baseline_name="plain",
          higher_is_better=False, correct=True, detail="same sums")
    for n in range(3)
]
picture = '<svg xmlns="http://www.w3.org/2000/svg"><title>Times</title><g id="axes"/><use href="#axes"/></svg>'
print("skipped: netlab, needs root")
{change}
(out / "times.svg").write_text(picture)
write_demo(out, "planted", claims, {{}})
"""


def tour(tmp_path, change="", *arguments):
    package = tmp_path / "lib" / "planted"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PACKAGE.format(change=change))
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [
            sys.executable,
            ROOT / "bench/tour.py",
            "planted",
            "--out",
            tmp_path / "report",
            *list(arguments),
        ],
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_sound_package_passes_and_fills_the_page(tmp_path):
    done = tour(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3.00x" in done.stdout
    assert "1 package, 3 claims, all correct" in done.stdout
    assert "skipped: netlab, needs root" in done.stdout
    page = (tmp_path / "report/index.html").read_text()
    assert page.count("<section") == 1
    assert '<g id="planted-axes"/><use href="#planted-axes"/>' in page
    assert "same sums" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    checked = tour(tmp_path, "", "--check")
    assert checked.returncode == 0, checked.stdout


def test_one_wrong_result_ends_with_status_1(tmp_path):
    wrong = """
import dataclasses
claims[1] = dataclasses.replace(claims[1], correct=False, detail="sums differ")
"""
    done = tour(tmp_path, wrong)
    assert done.returncode == 1
    assert "claim 'time 1' is not correct: sums differ" in done.stdout
    assert "failed: planted" in done.stdout
    assert 'class="no">NO<' in (tmp_path / "report/index.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "claims[0] = Claim(**(claims[0].to_json() | {'ours': 0.0, 'ratio': float('inf')}))",
            "ratio",
        ),
        ("claims.pop()", "2 claims, expected at least 3"),
        ("picture = ''", "picture times.svg is empty"),
        ("picture = picture.replace('title', 'desc')", "picture times.svg has no <title>"),
        ("write_demo(out, 'planted', claims, {}); sys.exit(0)", "no picture"),
    ],
)
def test_check_refuses_what_a_run_lets_pass(tmp_path, change, message):
    done = tour(tmp_path, change)
    assert done.returncode == 0, done.stdout + done.stderr
    checked = tour(tmp_path, change, "--check")
    assert checked.returncode == 1
    assert message in checked.stdout


def test_failing_demo_shows_the_end_of_its_stderr(tmp_path):
    tour(tmp_path)
    done = tour(tmp_path, "raise ValueError('no such graph')")
    assert done.returncode == 1
    assert "ended with exit status 1" in done.stdout
    assert "ValueError: no such graph" in done.stdout
    # What the earlier, sound run left is not taken for this run's.
    assert not (tmp_path / "report/planted/demo.json").exists()


def test_demo_out_of_time_is_ended_with_its_children(tmp_path):
    hang = f"""
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    for limit_s in (2, 20):  # on a busy machine the demo may not have come to its child in two
        done = tour(tmp_path, hang, "--timeout", str(limit_s))
        assert done.returncode == 1
        assert f"still running after {limit_s} s" in done.stdout
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    deadline = time.monotonic() + 60
    while is_running((tmp_path / "pid").read_text()):  # it may take a moment to end
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_check_without_a_report_says_what_is_missing(tmp_path):
    done = tour(tmp_path, "", "--check")
    assert done.returncode == 1
    assert "found no such file" in " ".join(done.stdout.split())


def test_unknown_package_is_a_usage_error(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "bench/tour.py", "nosuchpackage", "--out", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "'nosuchpackage'" in done.stderr
    assert "adaqp" in done.stderr
