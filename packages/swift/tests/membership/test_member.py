"""Which world a process enters; and one whose main thread nothing frees ends, so that a spare can take its place."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from swift.membership.channel import ControlChannel
from swift.membership.member import Membership, NewWorld

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


WORLD = {
    "epoch": 1, "recovery": 0, "rank": 1, "world_size": 2, "store": ("127.0.0.1", 1), "backend": "gloo",
    "timeout_s": 1.0, "lost": (),
}  # fmt: skip
supervisors = []
"""They stay: a process ends with its supervisor's connection."""


def test_a_world_that_an_interruption_has_overtaken_is_not_entered(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    ours, theirs = socket.socketpair()
    supervisors.append(supervisor := ControlChannel(ours))
    member = Membership(ControlChannel(theirs), rank=0, world_size=2, heartbeat_s=1000.0)
    supervisor.send({"kind": "world", **WORLD})
    supervisor.send({"kind": "interrupt", "epoch": 2})
    assert member.is_superseded(NewWorld(**WORLD), waits=True)
    entered = []
    waits = threading.Thread(target=lambda: entered.append(member.next_world()))
    waits.start()
    waits.join(0.1)
    assert entered == []
    supervisor.send({"kind": "world", **WORLD, "epoch": 3})
    waits.join(30)
    assert [(world.epoch, world.rank) for world in entered] == [(3, 1)]
    assert member.rank == 1
