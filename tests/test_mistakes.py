"""The same mistake has the same sentence in every package, and Ctrl-C ends every command in one line."""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

EMPTY = {
    "adaqp": ("graph.npz", "a graph", ["partition", "FILE", "--out", "DIR/parts"]),
    "gnnflow": ("events.csv", "a table", ["info", "FILE"]),
    "hybridflow": ("recipe.yaml", "a recipe as YAML", ["train", "FILE"]),
    "hydraulis": (
        "lengths.txt",
        "lengths, a number on each line",
        ["plan", "FILE", "--ranks", "2", "--cap", "8"],
    ),
    "llmpq": (
        "prompts.jsonl",
        "prompts as JSON Lines",
        ["sensitivity", "DIR/model", "--prompts", "FILE"],
    ),
    "memo": ("trace.csv", "intervals", ["pack", "FILE"]),
    "mspipe": ("events.csv", "a table", ["train", "FILE"]),
}


@pytest.mark.parametrize("package", EMPTY)
def test_an_empty_file_is_said_to_be_empty(package, tmp_path, capsys):
    name, what, words = EMPTY[package]
    file = tmp_path / name
    file.touch()
    argv = [word.replace("FILE", str(file)).replace("DIR", str(tmp_path)) for word in words]
    assert import_module(f"{package}.cli").main(argv) == 1
    assert capsys.readouterr().err == (
        f"{package}: {file}: expected {what}, the file is empty; check what wrote it\n"
    )


def is_at_work(pid):
    """Whether a process has imported torch or started others, as commands do when executed."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return bool(children) or "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def interrupt(words, is_begun, folder):
    """What a command says when Ctrl-C comes once it has begun, and its exit status."""
    command = [sys.executable, "-m", *words]
    # As in a terminal, all processes of its group get the signal.
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not is_begun(process.pid):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    return errors, process.returncode


TRAINING = {
    "adaqp": ["train", "parts", "--epochs", "9999999", "--save-every", "1", "--model.hidden", "8"],
    "gnnflow": [
        "train",
        "zipf:1000:400000",
        "--dim",
        "8",
        "--share",
        "0.001",
        "--fanouts",
        "9",
        "9",
    ],
    "hybridflow": ["train", "grpo-sort", "--set", "steps=9999999", "batch_size=16", "--every", "1"],
    "mspipe": ["train", "zipf:1000:40000", "--dim", "8", "--epochs", "9999"],
}


@pytest.mark.slow
@pytest.mark.parametrize("package", TRAINING)
def test_an_interrupted_training_says_how_to_resume(package, tmp_path):
    if package == "adaqp":
        made = ["adaqp", "partition", "sbm", "--num-nodes", "4000", "--out", "parts"]
        subprocess.run(
            [sys.executable, "-m", *made], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
        )
    saved = tmp_path / "run1"
    words = [package, *TRAINING[package], "--checkpoint", "run1"]
    errors, status = interrupt(words, lambda _: saved.is_dir() and any(saved.iterdir()), tmp_path)
    told = f"{package}: interrupted; resume from run1 by the same command\n"
    assert errors.endswith(told)
    assert errors.count("interrupted") == 1
    assert "Traceback" not in errors
    assert status == 130


PROGRAMS = {
    "adaqp": "adaqp", "bytecheckpoint": "bytecheckpoint", "gnnflow": "gnnflow",
    "hybridflow": "hybridflow", "hydraulis": "hydraulis", "llmpq": "llmpq", "memo": "memo",
    "mspipe": "mspipe", "swift": "meshyard-swift",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_an_interrupted_demo_ends_in_one_line(package, tmp_path):
    errors, status = interrupt([package, "demo", "--out", "out"], is_at_work, tmp_path)
    told = f"{PROGRAMS[package]}: interrupted; start again by the same command\n"
    assert errors.splitlines(keepends=True)[-1:] == [told], errors
    assert errors.count("interrupted") == 1
    assert "Traceback" not in errors
    assert status == 130
