"""Processes of this machine, looked for after tests that end some."""

import time
from pathlib import Path


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(pids):
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.02)


def with_variable(text):
    """Those that have some bytes in their environment."""
    return [pid for pid in _pids() if text in environment_of(pid)]


def _pids():
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
