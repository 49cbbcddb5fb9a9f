import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from shared.comms import Group, RankPool, all_reduce, init_from_env
from shared.comms.init import alone, joined
from shared.errors import ConfigError

SCRIPT = """
from datetime import timedelta
import torch
from shared.comms import Group, all_reduce, init_from_env
group = init_from_env(timeout=timedelta(seconds=33), backend="gloo")
assert group is init_from_env() is Group.world()
total = all_reduce(group, torch.tensor([float(group.rank + 1)])).item()
print(group.rank, group.world_size, group.timeout.total_seconds(), total)
"""


def timeout_of_the_world() -> float:
    assert init_from_env() is Group.world()
    return Group.world().timeout.total_seconds()


def test_world_keeps_the_pools_timeout(pool):
    assert pool.run(timeout_of_the_world).results == [120.0, 120.0]


def name_groups() -> tuple[bool, float]:
    one, other = Group.control(name="one"), Group.control(name="other")
    again = Group.control(name="one")
    # Were they one group, ranks that use them in different orders would wait for each other's messages.
    groups = [one, other] if Group.world().rank == 0 else [other, one]
    with ThreadPoolExecutor(2) as threads:
        ones = torch.ones(3)
        sizes = {id(one): 1.0, id(other): 10.0}
        totals = list(threads.map(lambda g: all_reduce(g, sizes[id(g)] * ones)[0].item(), groups))
    return again is one and other is not one, totals[groups.index(one)]


def test_groups_of_other_names_are_separate(pool):
    assert pool.run(name_groups).results == [(True, 2.0)] * 2


def test_missing_environment_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"RANK.* unset; start the script as `torchrun"):
        init_from_env(timeout=timedelta(seconds=1))


def test_unknown_backend(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(key, "0")
    with pytest.raises(ConfigError, match="'nccl', 'gloo' or None, got 'mpi'"):
        init_from_env(backend="mpi")


def test_a_world_of_this_process_is_left_whatever_happens():
    for _ in range(2):
        with alone() as group:
            assert (group.world_size, group.device_mesh().size()) == (1, 1)
        assert not Group.exists()
    with pytest.raises(KeyError, match="mistake"), alone():
        raise KeyError("mistake")
    assert not Group.exists()


def test_a_command_alone_leaves_the_world_that_it_joined(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(timedelta(seconds=7)) as group:
        assert (group.rank, group.world_size) == (0, 1)
        assert group.timeout.total_seconds() == 7
        with joined() as inner:
            assert inner is group
        assert Group.world() is group, "an inner block leaves what it did not join"
    assert not Group.exists()
    with pytest.raises(KeyError, match="mistake"), joined():
        raise KeyError("mistake")
    assert not Group.exists()


def test_a_command_joins_torchruns_world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK.* unset"), joined():
        pass


@pytest.mark.slow
def test_torchruns_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["0 2 33.0 3.0", "1 2 33.0 3.0"]


def sums_with_each_peer() -> list[float]:
    me, totals = Group.world().rank, []
    for peer in (1, 2):
        if me in (0, peer):
            group = Group.of([0, peer], members_only=True)
            totals.append(all_reduce(group, torch.tensor([float(me)])).item())
    return totals


def test_members_that_were_in_other_groups_before_meet_all_the_same():
    with RankPool(3, timeout=timedelta(seconds=60)) as pool:
        assert pool.run(sums_with_each_peer).results == [[1.0, 2.0], [1.0], [2.0]]
