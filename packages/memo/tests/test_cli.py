"""Commands: what they print, what they fail with, and that help is fast."""

import json
import subprocess
import sys

import pytest

from memo.cli import main

INTERVALS = "id,lower,upper,size\n0,0,2,4096\n1,1,3,8192\n2,2,4,4096\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(INTERVALS)
    return path


def test_pack_prints_the_peak_beside_the_bound(trace, tmp_path, capsys):
    offsets = tmp_path / "offsets.txt"
    assert main(["pack", str(trace), "--out", str(offsets)]) == 0
    assert "3 tensors in 12.0 KiB: 1.0000x" in capsys.readouterr().out
    assert len(offsets.read_text().split()) == 3
    assert main(["pack", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "num_tensors": 3, "peak_bytes": 12288, "lower_bound_bytes": 12288, "is_optimal": True,
    }  # fmt: skip


def test_a_full_disk_is_one_sentence(trace, small_disk, capsys):
    disk = small_disk(4096)
    (disk / "rest").write_bytes(bytes(4096))
    assert main(["pack", str(trace), "--out", str(disk / "offsets.txt")]) == 1
    assert capsys.readouterr().err == (
        f"memo: {disk}/offsets.txt: expected room on the disk for what is written there, got 0 bytes "
        "free; free some, or write to another disk\n"
    )


def test_replay_prints_three_allocators(trace, capsys):
    assert main(["replay", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load_bytes"] == 12288
    assert found["reserved_bytes"].keys() == {"caching", "expandable", "planned"}
    assert all(one >= 12288 for one in found["reserved_bytes"].values())
    assert main(["replay", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("needed at once  12.0 KiB")


def test_alpha_is_the_closed_form(capsys):
    sizes = ["--whole", "1GiB", "--rows", "4GiB", "--layers", "10"]
    assert main(["alpha", *sizes, "--link", "3GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"alpha": 0.5}
    assert main(["alpha", *sizes, "--store", "16GiB"]) == 0
    assert capsys.readouterr().out == "0.2500\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pack", "DIR/none.csv"], "none.csv: expected intervals, there is nothing; check the path"),
        (["replay", "DIR/none.pickle"], "expected a CUDA memory snapshot, there is nothing; check the path"),
        (["pack", "DIR"], "DIR: expected a CUDA memory snapshot, got a folder; name a file"),
        (["pack", "DIR/bytes.csv"], "bytes.csv: expected intervals, got bytes that are no UTF-8 text, first at byte 128;"),
        (["pack", "DIR/quoted.csv"], "quoted.csv: expected intervals as CSV, got field larger than"),
        (["replay", "DIR/large.csv"], "large.csv, line 2: expected numbers below 2^62, got"),
        (["pack", "DIR/trace.csv", "--out", "DIR/none/x"], "out: expected a file that can be written, got DIR/none/x: "),
        (["alpha", "--whole", "x", "--rows", "1", "--layers", "3"], "whole: expected a size such as"),
        (["demo", "--out", "DIR/trace.csv"], "DIR/trace.csv: expected a folder, got a file; name another"),
    ],
)  # fmt: skip
def test_mistakes_fail_with_status_1_and_a_line(trace, argv, text, tmp_path, capsys):
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)))
    (tmp_path / "quoted.csv").write_text('id,lower,upper,size\n0,1,2,"' + "3" * 200_000)
    (tmp_path / "large.csv").write_text(f"id,lower,upper,size\n0,0,{2**70},1\n")
    assert main([one.replace("DIR", str(tmp_path)) for one in argv]) == 1
    said = capsys.readouterr().err.replace(str(tmp_path), "DIR")
    assert said.startswith("memo: ")
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["fit"], ["fit", "--optimizer", "lion"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_help_imports_nothing_heavy():
    code = (
        "import sys, contextlib\nfrom memo.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("fit", "pack", "replay", "alpha", "demo"):
        assert command in done.stdout
