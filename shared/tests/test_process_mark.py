"""A mark is of one process: not of another with its number, and not of what only looks like a mark."""

import os
import subprocess
import sys
from pathlib import Path

from shared.process_mark import is_alive, mark


def test_a_mark_is_of_the_process_that_made_it():
    pid, ticks = mark().split("-")
    assert int(pid) == os.getpid()
    assert is_alive(mark())
    assert is_alive(f"{mark()}-7")
    assert not is_alive(f"{pid}-{int(ticks) + 1}"), "another process had this number before"


def test_a_process_that_ended_is_not_alive():
    program = "from shared.process_mark import mark; print(mark())"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert not is_alive(done.stdout.strip())


def test_names_that_are_no_marks():
    for name in ("", "-", "backup", "backup-2", "1x-3", str(os.getpid())):
        assert not is_alive(name)


def test_a_process_may_have_any_name():
    """The kernel writes the name in parentheses before the tick, whatever is in it."""
    before, comm = mark(), Path("/proc/self/comm")
    name = comm.read_text()
    try:
        comm.write_text("a) b (c")
        assert mark() == before
    finally:
        comm.write_text(name)
