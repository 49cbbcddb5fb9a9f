"""Processes of a host, as its supervisor knows them."""

import selectors
import subprocess

import pytest

from shared.comms.launch.forking import Forked
from swift.membership import supervisor
from swift.membership.supervisor import Launch, Local


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
