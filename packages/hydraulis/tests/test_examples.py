"""The scripts of examples/ run as their users start them, on their own data too."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder of its own and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def write_lengths(lengths):
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in lengths))


def steps_of(text):
    found = re.findall(r"^step \d+: ([\d.]+) s, ([\d.]+)% busy$", text, re.MULTILINE)
    return [(float(seconds), float(share)) for seconds, share in found]


def test_ranks_are_busy_with_documents_of_ones_own(run):
    write_lengths([100 + 37 * at % 900 for at in range(400)] + [9_000])
    told = run(
        "balance_ranks.py", "lengths.txt", "--ranks", "2", "--tokens-per-step", "40000",
        "--cap", "4096",
    )  # fmt: skip
    assert told.startswith("left out 1 documents above 4,096 tokens\n")
    steps = steps_of(told)
    assert len(steps) >= 4
    assert min(share for _, share in steps) > 98
    default = steps_of(run("balance_ranks.py"))
    assert default
    assert all(0 < share <= 100 for _, share in default)


def test_long_documents_of_ones_own_get_several_ranks(run):
    write_lengths([100] * 20 + [3_500, 1_900])
    told = run("plan_degrees.py", "lengths.txt", "--ranks", "8", "--cap", "1000")
    degrees = [int(one) for one in re.search(r"groups of \[(.*)\]", told)[1].split(", ")]
    assert max(degrees) >= 4, "3,500 tokens do not fit on fewer"
    ours, plain = map(float, re.findall(r"ranks: ([\d.]+) s", told))
    assert ours <= plain
    assert float(re.search(r"at most ([\d.]+)%", run("plan_degrees.py"))[1]) < 20


@pytest.mark.slow  # the README's and the guide's blocks train too
def test_documents_of_ones_own_train_and_resume(tmp_path):
    for at in range(20):
        (tmp_path / f"{at}.txt").write_text(f"document {at} " * (3 + at))

    def train(*arguments):
        done = subprocess.run(
            [
                *(sys.executable, EXAMPLES / "train_documents.py", "--documents", tmp_path),
                *("--max-tokens", "512", *arguments),
            ],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def losses_of(text):
        return dict(re.findall(r"^step (\d+): loss ([\d.]+)$", text, re.MULTILINE))

    whole = losses_of(train("--folder", "whole", "--steps", "12"))
    first, rest = (
        train("--folder", "parts", "--steps", "7"),
        train("--folder", "parts", "--steps", "12"),
    )
    assert rest.startswith("resumed from step 7 of parts\n")
    assert list(losses_of(rest)) == ["8", "9", "10", "11", "12"]
    assert losses_of(first) | losses_of(rest) == whole
    assert float(whole["12"]) < float(whole["1"])


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []
