"""Two hosts on an emulated network: a host is cut off, and its ranks are replaced on the other."""

import time

import launching
import pytest

from shared.comms import NetLab, netlab

REASON = netlab.available()
STEPS = 40

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


def end(processes):
    for process in processes:
        process.terminate()
    return [process.communicate(timeout=30)[0] for process in processes]


def test_a_host_that_is_cut_off_is_replaced_and_fences_its_ranks(tmp_path):
    launching.run(tmp_path / "whole", "-n", "4", "--spares", "0", steps=STEPS)
    with NetLab(hosts=2, rate="1gbit") as lab:
        folder = tmp_path / "cut"
        given = {"steps": STEPS, "step_s": 0.1}
        processes = [start(lab, folder, host, 1.5, **given) for host in range(2)]
        wait_for_step(folder, 8)
        lab.cut(1)
        # The cut-off host has its own report; the first one's tells the loss.
        printed, _ = processes[0].communicate(timeout=launching.LIMIT_S)
        assert processes[0].returncode == 0, printed
        lab.restore(1)
        told = end(processes[1:])
    assert "its ranks are replaced, so they are killed here" in told[0]
    assert launching.states(folder) == launching.states(tmp_path / "whole")
    (failure,) = launching.failures(folder)
    assert sorted(one["rank"] for one in failure["lost"]) == [2, 3]
    assert all("was cut off" in one["how"] for one in failure["lost"])


def test_when_the_first_supervisor_ends_all_end(tmp_path):
    with NetLab(hosts=2, rate="1gbit") as lab:
        processes = [start(lab, tmp_path, host, 3.0, steps=400, step_s=0.05) for host in range(2)]
        wait_for_step(tmp_path, 3)
        processes[0].kill()
        printed, _ = processes[1].communicate(timeout=30)
        processes[0].communicate(timeout=30)
    assert processes[1].returncode == 1
    assert "the first supervisor has ended, and the run with it" in printed
