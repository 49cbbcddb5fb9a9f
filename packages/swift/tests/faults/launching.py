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
STEPS = 16
_LIBRARIES = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
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


def launch(folder, *options, prefix=(), temporary=None, **given):
    """Starts a run in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "swift", "run", *arguments(folder, *options, **given)],
        env={**os.environ, **({} if temporary is None else {"TMPDIR": str(temporary)})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Driver:
    """A process that does one run after another, so that Python's start is waited for once.

    Attributes:
        preloaded: the module that its template imports besides torch.
        temporary: its folder for temporary files.
    """

    def __init__(self, folder, preloaded="torch.distributed.fsdp"):
        self.preloaded = preloaded
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._log = folder / "log"
        self._is_running = False
        self._launch()

    def _launch(self):
        self._start = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py"))],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), *_LIBRARIES]),
                "TMPDIR": str(self.temporary),
                "GLOO_SOCKET_IFNAME": "lo",  # runs of several hosts share the template of single ones
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )

    def begin(self, folder, *words):
        """Begins `meshyard-swift run WORDS` in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_running:  # a test has failed before its run's end
            self._kill()
            self._launch()
        self._is_running = True
        self._start = self._log.stat().st_size
        command = ["run", "--preload", self.preloaded, *map(str, words)]
        self._process.stdin.write(json.dumps([str(folder), command]) + "\n")
        self._process.stdin.flush()

    def end(self, status=0):
        """Waits for the run's end and returns what it has printed; nothing of it may be left."""
        readable, _, _ = select.select([self._process.stdout.fileno()], [], [], LIMIT_S)
        printed = self._log.read_bytes()[self._start :].decode()
        assert readable, f"the run did not end:\n{printed}"
        answer, self._is_running = self._process.stdout.readline(), False
        assert answer == f"{status}\n", printed
        assert count_ranks(self._process.pid) == 0
        left = {path.name for path in self.temporary.iterdir()}
        assert {
            name for name in left if not name.startswith("torchinductor")
        } == set()  # torch's cache
        return printed

    def run(self, folder, *words, status=0):
        """Does a run and returns what it has printed."""
        self.begin(folder, *words)
        return self.end(status)

    def train(self, folder, *options, status=0, **given):
        """Runs the small training."""
        return self.run(folder, *arguments(folder, *options, **given), status=status)

    def signal(self, number):
        """Sends a signal to the supervisor."""
        self._process.send_signal(number)

    def _kill(self):
        self._process.kill()
        self._process.communicate()
        assert wait_until_gone(self._process.pid) == []

    def close(self):
        if self._is_running:
            self._kill()
            return
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


def wait_for_step(folder, step):
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "states").exists() or max(states(folder), default=-1) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
