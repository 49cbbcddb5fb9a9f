"""Two hosts on an emulated network: one is cut off, and its ranks are replaced on the other."""

import itertools
import subprocess
from collections import defaultdict
from contextlib import contextmanager

import launching
import pytest

from shared.comms import NetLab, netlab

REASON = netlab.available()
STEPS, STEP_S, HEARTBEAT_S = 40, 0.1, 1.5

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


def start(lab, folder, host, spares):
    options = [
        *("-n", "2", "--spares", str(spares), "--nnodes", "2", "--node-rank", str(host)),
        *("--master-addr", lab.address(0), "--heartbeat", str(HEARTBEAT_S), "--wait", "60"),
    ]
    prefix = [*lab.command(host), "env", "GLOO_SOCKET_IFNAME=veth0"]
    return launching.launch(folder, *options, prefix=prefix, steps=STEPS, step_s=STEP_S)


@contextmanager
def two_hosts(folder):
    """Four ranks on two hosts at work, two spares on the first."""
    with NetLab(hosts=2, rate="1gbit") as lab:
        processes = [start(lab, folder, host, spares) for host, spares in enumerate((2, 0))]
        launching.wait_for_step(folder, 8)
        try:
            yield lab, processes
        finally:
            for process in processes:
                process.terminate()
                process.communicate(timeout=30)


def longest_stall_s(folder):
    """The longest that a rank which was there at the beginning went without a step, less its usual step."""
    times = defaultdict(list)
    for line in (folder / "states").read_text().splitlines():
        _, _, rank, at_s, _ = line.split()
        if rank in "01":
            times[rank].append(float(at_s))
    gaps = sorted(b - a for one in times.values() for a, b in itertools.pairwise(sorted(one)))
    return gaps[-1] - gaps[len(gaps) // 2]


@pytest.fixture(scope="module")
def whole(driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    driver.train(folder, "-n", "4", "--spares", "0", steps=STEPS)
    return launching.states(folder)


def lose_frames(lab, sender, receiver):
    """What one host sends to the other goes to an address that nobody has; the other way is whole."""
    command = ["ip", "neigh", "replace", lab.address(receiver), "lladdr", "02:00:00:00:00:99"]
    subprocess.run(
        [*lab.command(sender), *command, "dev", "veth0", "nud", "permanent"], check=True, timeout=30
    )


def test_a_host_that_is_cut_off_is_replaced_and_fences_its_ranks(whole, tmp_path):
    folder = tmp_path
    with two_hosts(folder) as (lab, processes):
        lab.cut(1)
        printed, _ = processes[0].communicate(timeout=launching.LIMIT_S)
        assert processes[0].returncode == 0, printed
        lab.restore(1)
        processes[1].terminate()
        fenced, _ = processes[1].communicate(timeout=30)
    assert "its ranks are replaced, so they are killed here" in fenced
    assert launching.states(folder) == whole
    (failure,) = launching.failures(folder)
    assert sorted(one["rank"] for one in failure["lost"]) == [2, 3]
    assert all("was cut off" in one["how"] for one in failure["lost"])
    assert longest_stall_s(folder) <= HEARTBEAT_S + 0.2


# Where the first host sends in vain, heartbeats reach it until TCP waits for acknowledgements that are lost.
@pytest.mark.parametrize(("sender", "receiver", "more_s"), [(0, 1, 0.5), (1, 0, 0.2)])
def test_a_host_that_is_cut_off_in_one_direction_is_replaced_too(
    whole, tmp_path, sender, receiver, more_s
):
    with two_hosts(tmp_path) as (lab, processes):
        lose_frames(lab, sender, receiver)
        printed, _ = processes[0].communicate(timeout=launching.LIMIT_S)
        assert processes[0].returncode == 0, printed
        assert launching.count_ranks(processes[1].pid) == 0
    assert launching.states(tmp_path) == whole
    assert longest_stall_s(tmp_path) <= HEARTBEAT_S + more_s


def test_when_the_first_supervisor_ends_all_end(tmp_path):
    with two_hosts(tmp_path) as (_, processes):
        processes[0].kill()
        printed, _ = processes[1].communicate(timeout=30)
    assert processes[1].returncode == 1
    assert "the first supervisor has ended, and the run with it" in printed
