"""Processes of a host, as its supervisor knows them."""

import os
import selectors
import socket
import subprocess

import pytest

from shared.comms.launch.forking import Forked
from swift.membership import supervisor
from swift.membership.channel import ControlChannel
from swift.membership.settings import Launch
from swift.membership.supervisor import Local


@pytest.mark.parametrize("kind", ["world", "interrupt"])
def test_a_spare_that_is_given_a_place_counts_as_a_rank_also_while_it_waits(monkeypatch, kind):
    with subprocess.Popen(["sleep", "60"]) as process, selectors.DefaultSelector() as selector:
        forked = object.__new__(Forked)
        forked.pid = process.pid
        monkeypatch.setattr(supervisor, "fork", lambda *args, **more: forked)
        launch = Launch(
            script=(__file__,), host=0, ranks=(0,), num_spares=1, world_size=3, heartbeat_s=1.0
        )
        local = Local(launch, selector)
        name = local.start(None)
        assert local.rank_of(name) is None
        local.send(name, {"kind": kind, "epoch": 1, "rank": 2})
        assert local.rank_of(name) == 2
        process.kill()


def test_a_process_that_has_ended_as_it_started_is_said(monkeypatch):
    with subprocess.Popen(["true"]) as process:
        pass
    forked = object.__new__(Forked)
    forked.pid = process.pid
    monkeypatch.setattr(supervisor, "fork", lambda *args, **more: forked)
    launch = Launch(
        script=(__file__,), host=0, ranks=(0,), num_spares=1, world_size=1, heartbeat_s=1.0
    )
    with (
        selectors.DefaultSelector() as selector,
        pytest.raises(supervisor.ConfigError, match=r"to run and to be watched, got .*; see why"),
    ):
        Local(launch, selector).start(None)


def test_a_recovery_lasts_from_a_world_to_the_first_step_in_it(monkeypatch):
    ends = []
    with subprocess.Popen(["sleep", "60"]) as process, selectors.DefaultSelector() as selector:
        forked = object.__new__(Forked)
        forked.pid = process.pid

        def fork(descriptor, *args, **more):
            ends.append(ControlChannel(socket.socket(fileno=os.dup(descriptor))))
            return forked

        monkeypatch.setattr(supervisor, "fork", fork)
        launch = Launch(
            script=(__file__,), host=0, ranks=(0,), num_spares=0, world_size=1, heartbeat_s=1.0
        )
        local = Local(launch, selector)
        name = local.start(0)

        def hear(message):
            ends[0].send(message)
            local.receive(name)
            return local.is_recovering()

        assert not local.is_recovering()
        local.send(name, {"kind": "world", "epoch": 1, "rank": 0})
        assert local.is_recovering()
        assert hear({"kind": "beat", "step": 3})
        assert hear({"kind": "ready", "fingerprint": {}})
        assert not hear({"kind": "beat", "step": 3, "epoch": 1})
        local.send(name, {"kind": "world", "epoch": 2, "rank": 0})
        assert hear({"kind": "beat", "step": 3, "epoch": 1})  # of the world before
        local.send(name, {"kind": "interrupt", "epoch": 3, "rank": 0})
        assert not local.is_recovering()  # it waits for a spare
        ends[0].close()
        process.kill()
