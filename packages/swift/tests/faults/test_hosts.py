"""Two hosts on an emulated network."""

import time

import launching
import pytest

from shared.comms import NetLab, netlab

REASON = netlab.available()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


def start(lab, folder, host, heartbeat, **given):
    options = [
        *("-n", "2", "--spares", "2" if host == 0 else "0", "--nnodes", "2"),
        *("--node-rank", str(host), "--master-addr", lab.address(0)),
        *("--heartbeat", str(heartbeat), "--wait", "60"),
    ]
    prefix = [*lab.command(host), "env", "GLOO_SOCKET_IFNAME=veth0"]
    return launching.launch(folder, *options, prefix=prefix, **given)


def wait_for_step(folder, step):
    deadline = time.monotonic() + 90
    while not (folder / "states").exists() or max(launching.states(folder)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_when_the_first_supervisor_ends_all_end(tmp_path):
    with NetLab(hosts=2, rate="1gbit") as lab:
        processes = [start(lab, tmp_path, host, 3.0, steps=400, step_s=0.05) for host in range(2)]
        wait_for_step(tmp_path, 3)
        processes[0].kill()
        printed, _ = processes[1].communicate(timeout=30)
        processes[0].communicate(timeout=30)
    assert processes[1].returncode == 1
    assert "the first supervisor has ended, and the run with it" in printed
