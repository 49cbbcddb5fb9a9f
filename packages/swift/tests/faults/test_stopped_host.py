"""Two supervisors on one machine: all processes of the second are stopped, and continued later."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import launching
import pytest

STEPS, HEARTBEAT_S = 60, 1.0


def start(folder, port, host, spares):
    options = [
        *("-n", "2", "--spares", str(spares), "--nnodes", "2", "--node-rank", str(host)),
        *("--master-port", str(port), "--heartbeat", str(HEARTBEAT_S), "--wait", "60"),
    ]
    prefix = ["env", "GLOO_SOCKET_IFNAME=lo"]
    return launching.launch(folder, *options, prefix=prefix, steps=STEPS, step_s=0.1)


def processes_of(supervisor):
    """A supervisor, its templates, and what they have forked."""
    templates = launching.children_of(supervisor)
    forked = [
        int(pid)
        for one in templates
        for pid in (Path("/proc") / str(one) / "task" / str(one) / "children").read_text().split()
    ]
    return [supervisor, *templates, *forked], forked


def lines_of(folder, pids):
    lines = [line.split() for line in (folder / "states").read_text().splitlines()]
    return [line for line in lines if int(line[4]) in pids]


@pytest.mark.slow
def test_a_host_that_was_stopped_comes_back_with_spares(driver, tmp_path):
    driver.train(tmp_path / "whole", "-n", "4", "--spares", "0", steps=STEPS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path / "stopped"
    hosts = [start(folder, port, host, spares) for host, spares in enumerate((2, 0))]
    try:
        launching.wait_for_step(folder, 8)
        stopped, ranks = processes_of(hosts[1].pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        before = lines_of(folder, ranks)
        launching.wait_for_step(folder, max(launching.states(folder)) + 5)
        for pid in reversed(stopped):  # ranks first: nobody keeps them from going on
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
        printed, _ = hosts[0].communicate(timeout=launching.LIMIT_S)
        fenced, _ = hosts[1].communicate(timeout=30)
    finally:
        for host in hosts:
            if host.poll() is None:
                host.kill()
                sys.stderr.write(host.communicate()[0])
    assert (hosts[0].returncode, hosts[1].returncode) == (0, 0), printed + fenced
    assert "they are killed here" in fenced
    assert left == []
    # A rank ends the step that it was in, at most: the next one needs the others.
    assert len(lines_of(folder, ranks)) - len(before) <= len(ranks)
    assert launching.states(folder) == launching.states(tmp_path / "whole")
    (failure,) = launching.failures(folder)
    assert sorted(one["rank"] for one in failure["lost"]) == [2, 3]
    assert all(rank["seconds"]["detect"] < 4 * HEARTBEAT_S for rank in failure["ranks"].values())
