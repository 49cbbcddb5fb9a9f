"""Spares that end again and again are not started for ever; processes are stubs."""

import socket
import threading

import pytest

from shared.errors import ConfigError
from swift.membership import host_loop
from swift.membership.host_loop import HostLoop
from swift.membership.settings import Launch
from swift.membership.supervisor import Ended

KILLED = "was killed by signal 11 (SIGSEGV)"


class StubLocal:
    """Processes that say and do what a test tells."""

    def __init__(self, selector):
        self.selector, self.living, self.ended, self.said = selector, {}, {}, []
        self.pair = socket.socketpair()
        self.recovers = False

    def is_recovering(self):
        return self.recovers

    def start(self, rank):
        name = f"0.{len(self.living) + len(self.ended)}"
        self.living[name] = rank
        return name

    def end(self, name, status, *, was_ready):
        how = KILLED if status is None else f"ended with status {status}"
        self.ended[name] = Ended(self.living[name], was_ready, how, status, 0.0)
        self.selector.register(self.pair[0], 2, ("ended", name))

    def say(self, name, message):
        self.said.append(message)
        self.selector.register(self.pair[0], 2, ("says", name))

    def receive(self, name):
        self.selector.unregister(self.pair[0])
        said, self.said = self.said, []
        return said

    def reap(self, name):
        self.selector.unregister(self.pair[0])
        del self.living[name]
        return self.ended[name]

    def rank_of(self, name):
        return self.living[name]

    def names(self):
        return list(self.living)

    def fence_silent(self):
        pass

    def next_limit_s(self):
        return float("inf")


class Loop(HostLoop):
    def started(self, name, rank):
        pass

    def said(self, name, message):
        pass

    def gone(self, name, ended):
        pass


@pytest.fixture
def clock(monkeypatch):
    """Moves the time of the loop."""
    now = [100.0]
    monkeypatch.setattr(host_loop.time, "monotonic", lambda: now[0])

    def pass_s(seconds):
        now[0] += seconds

    return pass_s


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(host_loop, "Local", lambda launch, selector: StubLocal(selector))
    launch = Launch(
        script=(__file__,), host=0, ranks=(0,), num_spares=2, world_size=1, heartbeat_s=1.0
    )
    found = Loop(launch)
    found.start_all((0,))
    yield found
    found.selector.close()


def spares(loop):
    return [name for name in loop.local.names() if loop.local.rank_of(name) is None]


def end_a_spare(loop, status, was_ready):
    loop.local.end(spares(loop)[0], status, was_ready=was_ready)
    loop.watch(lambda key: None)


def refill(loop, clock, num_waiting=0):
    """Starts what is missing, long after."""
    loop.refill(num_waiting)
    clock(60.0)
    loop.refill(num_waiting)


def test_a_spare_that_is_used_or_killed_while_it_waits_is_replaced_whenever_it_happens(loop, clock):
    for _ in range(20):
        refill(loop, clock)
        assert len(spares(loop)) == 2
        end_a_spare(loop, None, was_ready=True)
    assert loop.can_replace


@pytest.mark.parametrize("status", [1, 3])
def test_a_spare_that_fails_is_not_started_again(loop, clock, status):
    end_a_spare(loop, status, was_ready=False)
    refill(loop, clock)
    assert len(spares(loop)) == 1
    assert not loop.can_replace


def test_spares_killed_before_they_are_ready_are_started_later_each_time_and_not_for_ever(
    loop, clock, capsys
):
    waits = []
    for _ in range(5):
        end_a_spare(loop, None, was_ready=False)
        assert loop.can_replace
        wait_s = 0.0
        while len(spares(loop)) < 2:
            clock(0.01)
            wait_s += 0.01
            loop.refill(2)  # ranks wait for one: at once but for the delay
        waits.append(wait_s)
    assert waits == pytest.approx([0.1, 0.3, 0.7, 1.5, 3.1], abs=0.02)
    end_a_spare(loop, None, was_ready=False)
    refill(loop, clock)
    assert len(spares(loop)) == 1
    assert not loop.can_replace
    told = capsys.readouterr().err
    assert told.count("6 spares of host 0 in a row were lost before they were ready, ") == 1
    assert KILLED in told


def test_a_spare_that_becomes_ready_ends_the_row(loop, clock):
    for _ in range(9):
        end_a_spare(loop, None, was_ready=False)
        refill(loop, clock)
        loop.local.say(spares(loop)[-1], {"kind": "ready"})
        loop.watch(lambda key: None)
    assert loop.can_replace
    assert len(spares(loop)) == 2


def test_a_host_that_is_cut_off_on_purpose_comes_back(monkeypatch):
    commands, is_up = [], threading.Event()

    def run(command, **options):
        commands.append(command)
        if command[-1] == "up":
            is_up.set()

    monkeypatch.setattr(host_loop.subprocess, "run", run)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "veth7")
    no_processes = object.__new__(host_loop.Local)
    host_loop.disturb(no_processes, {"kind": "cut", "seconds": 0.05})
    link = ["ip", "link", "set", "dev", "veth7"]
    assert commands == [[*link, "down"]]
    assert is_up.wait(10)
    assert commands == [[*link, "down"], [*link, "up"]]


@pytest.mark.parametrize("error", [ConfigError("no memory"), TimeoutError("no answer in 60 s")])
def test_a_spare_that_cannot_be_started_is_tried_again_later(
    loop, clock, capsys, monkeypatch, error
):
    end_a_spare(loop, None, was_ready=True)
    start = loop.local.start

    def refuse(rank):
        raise error

    monkeypatch.setattr(loop.local, "start", refuse)
    for _ in range(3):
        refill(loop, clock)
    assert capsys.readouterr().err == (
        f"meshyard-swift: host 0 can start no spare, and will try again: {error}\n"
    )
    assert len(spares(loop)) == 1
    monkeypatch.setattr(loop.local, "start", start)
    refill(loop, clock)
    assert len(spares(loop)) == 2
    assert loop.can_replace


def use_a_spare(loop):
    loop.refill(0)
    loop.local.living[spares(loop)[0]] = 0
    loop.local.recovers = True


def spares_after(loop, clock, seconds):
    clock(seconds)
    loop.refill(0)
    return len(spares(loop))


def test_a_used_spare_is_replaced_once_the_recovery_is_over(loop, clock):
    use_a_spare(loop)
    assert [spares_after(loop, clock, 2.0) for _ in range(3)] == [1, 1, 1]
    loop.local.recovers = False
    assert spares_after(loop, clock, 0.0) == 2


def test_a_used_spare_is_not_replaced_within_a_second(loop, clock):
    use_a_spare(loop)
    loop.local.recovers = False
    assert [spares_after(loop, clock, 0.45) for _ in range(3)] == [1, 1, 2]


def test_a_used_spare_is_replaced_in_a_recovery_that_does_not_end_or_that_waits_for_one(
    loop, clock
):
    use_a_spare(loop)
    assert [spares_after(loop, clock, 4.9) for _ in range(3)] == [1, 1, 2]
    use_a_spare(loop)
    loop.refill(1)
    assert len(spares(loop)) == 2
