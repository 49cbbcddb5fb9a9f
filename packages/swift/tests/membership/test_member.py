"""A process whose main thread nothing frees ends, so that a spare can take its place."""

import subprocess
import sys

import pytest

STUCK = """
import threading, time
from swift.membership import member
member._STUCK_S = 0.3
def watch_it():
    watch = member.StuckWatch()
    while True:
        watch.check()
        time.sleep(0.02)
threading.Thread(target=watch_it, daemon=True).start()
{main}
print("free", flush=True)
"""
WAITS = "threading.Event().wait(20)"
COMPUTES = """
end = time.monotonic() + 1.0
while time.monotonic() < end:
    pass
"""


@pytest.mark.parametrize(("main", "status", "printed"), [(WAITS, -9, ""), (COMPUTES, 0, "free")])
def test_a_thread_that_computes_nothing_is_taken_for_stuck(main, status, printed):
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(main=main)], check=False, capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert done.stdout.strip() == printed
    assert ("a spare takes its place" in done.stderr) == (status != 0)
