"""Commands: what they print, what they fail with, and that help is fast."""

import json
import subprocess
import sys

import pytest

from swift.cli import main

SCRIPT = """
import sys
import torch
import swift
run = swift.join()
model = torch.nn.Linear(2, 2)
dp = swift.DataParallel(model, swift.undoable(torch.optim.SGD(model.parameters(), 0.1)), run)
def step(i):
    dp.backward(dp(torch.ones(1, 2)).sum())
run.loop(step, dp, until=2)
sys.stdout.write(f"rank {run.rank} {sys.argv[1:]}{chr(10)}")
"""


def start(tmp_path, *words):
    return subprocess.run(
        [sys.executable, "-m", "swift", *words], cwd=tmp_path, check=False, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip


def test_a_scripts_own_options_reach_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--batch", "64", "--report", "its-own")
    done = start(tmp_path, "run", "-n", "2", "--spares", "0", "train.py", *options)
    assert done.returncode == 0, done.stderr
    expected = {f"rank {rank} {list(options)}" for rank in range(2)}
    assert set(done.stdout.splitlines()) == expected


def test_a_missing_script_is_named(tmp_path):
    done = start(tmp_path, "run", "-n", "1", "--spares", "0", "none.py")
    assert done.returncode != 0
    assert "none.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_fails_ends_the_run_with_its_own_words(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('no data in /none')")
    done = start(tmp_path, "run", "-n", "1", "--spares", "0", "train.py")
    assert done.returncode == 1
    assert "no data in /none" in done.stderr


def test_without_a_run_status_says_so(tmp_path):
    done = start(tmp_path, "status", "--at", "127.0.0.1:1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("meshyard-swift: ")


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["inject", "burn", "1"], ["run", "-n", "x"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_simulated_failures_are_printed_as_json(capsys):
    assert main(["simulate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_help_imports_nothing_heavy():
    code = (
        "import sys, contextlib\nfrom swift.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("run", "status", "inject", "plan-logs", "verify-log", "simulate", "demo"):
        assert command in done.stdout
