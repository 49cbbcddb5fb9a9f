"""A process whose main thread nothing frees ends, so that a spare can take its place."""

import json
import subprocess
import sys

import pytest

STUCK = """
import json, os, sys, threading, time
from swift.membership import member
member.StuckWatch.limit_s = 0.3

def watch_it():
    watch = member.StuckWatch()
    while True:
        watch.check()
        time.sleep(0.02)

def run(main, module):
    threading.Thread(target=watch_it, daemon=True).start()
    exec(main, {"__name__": module, "threading": threading, "time": time})
    os._exit(7)

found = []
for main, module in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        run(main, module)
    found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(found))
"""
WAITS = "threading.Event().wait({seconds})"
COMPUTES = """
end = time.monotonic() + 1.0
while time.monotonic() < end:
    pass
"""
CASES = {
    "waits in a message": (WAITS.format(seconds=20), "shared.comms.courier", -9),
    "computes": (COMPUTES, "shared.comms.courier", 7),
    "waits for something else": (WAITS.format(seconds=1), "__main__", 7),
    "writes a checkpoint": (WAITS.format(seconds=1), "torch.distributed.checkpoint.filesystem", 7),
}


@pytest.fixture(scope="module")
def ended():
    """Exit statuses by case, and what was printed: one interpreter imports torch for all."""
    given = json.dumps([[main, module] for main, module, _ in CASES.values()])
    command = [sys.executable, "-c", STUCK, given]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return dict(zip(CASES, json.loads(done.stdout), strict=True)), done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_thread_that_only_waits_in_a_message_is_taken_for_stuck(ended, case):
    statuses, printed = ended
    assert statuses[case] == CASES[case][2]
    assert printed.count("a spare takes its place, filled from a replica or else a") == 1
