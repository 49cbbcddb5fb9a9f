"""Runs of `meshyard-swift run` in the tests, and what they leave."""

import json
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

SCRIPT = Path(__file__).with_name("small_training.py")
TESTS = Path(__file__).parents[1]
PRELOADED = ["transformers.models.llama.modeling_llama"]
LIMIT_S = 100.0


def arguments(folder, *options, script=SCRIPT, **given):
    """Of `meshyard-swift run` for the small training."""
    return [
        "--report",
        str(folder / "report.json"),
        *options,
        str(script),
        str(folder),
        json.dumps(given),
    ]


def launch(folder, *options, prefix=(), **given):
    """Starts a run in the background; its processes name the folder in their arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "swift", "run", *arguments(folder, *options, **given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, folder, status=0):
    """Waits for a run's end and returns what it has printed; nothing of it may be left."""
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        raise AssertionError(f"the run did not end:\n{printed}") from None
    assert process.returncode == status, printed
    assert wait_until_gone(process.pid) == []
    return printed


class Driver:
    """A process that does one run after another, so that Python's start is waited for once."""

    def __init__(self, log):
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py"))],
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )

    def run(self, folder, *words, status=0):
        """Does `meshyard-swift run WORDS` in a folder and returns what it has printed."""
        start = self._log.stat().st_size
        command = ["run", "--preload", *PRELOADED, *map(str, words)]
        self._process.stdin.write(json.dumps([str(folder), command]) + "\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout.fileno()], [], [], LIMIT_S)
        printed = self._log.read_bytes()[start:].decode()
        assert readable, f"the run did not end:\n{printed}"
        assert self._process.stdout.readline() == f"{status}\n", printed
        assert count_ranks(self._process.pid) == 0
        return printed

    def train(self, folder, *options, status=0, **given):
        """Runs the small training."""
        folder.mkdir(parents=True, exist_ok=True)
        return self.run(folder, *arguments(folder, *options, **given), status=status)

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        assert wait_until_gone(self._process.pid) == []


def count_ranks(pid):
    """Processes that the templates of a supervisor have forked and that live."""
    return sum(
        len((Path("/proc") / str(one) / "task" / str(one) / "children").read_text().split())
        for one in children_of(pid)
    )


def states(folder):
    """Step -> the digests of all ranks at its beginning, repeated steps' too."""
    found = defaultdict(set)
    for line in (folder / "states").read_text().splitlines():
        step, state, *_ = line.split()
        found[int(step)].add(state)
    return dict(found)


def failures(folder):
    return json.loads((folder / "report.json").read_text())["failures"]


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while (left := children_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def children_of(pid):
    """Living processes that a run has started, by the command line of its template."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        is_template = b"shared.comms.launch.template" in words
        if is_template and str(pid).encode() in words and stat[0] != "Z":
            found.append(int(entry.name))
    return found
