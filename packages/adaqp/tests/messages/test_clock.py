"""Seconds by phase add up to those of the step, and compiling is a phase of its own."""

import pytest

from adaqp.messages import clock as module
from adaqp.messages.clock import PHASES, Clock


@pytest.fixture
def work(monkeypatch):
    """Passes seconds of work, or of compiling, on clocks that stand still otherwise."""
    now = {"work": 100.0, "compile": 7.0}
    monkeypatch.setattr(module.time, "perf_counter", lambda: now["work"])
    monkeypatch.setattr(module, "compile_s", lambda: now["compile"])

    def spend(seconds, compiling=0.0):
        now["work"] += seconds + compiling
        now["compile"] += compiling

    return spend


def test_a_step_is_split_into_its_phases_and_compute(work):
    clock = Clock()
    with clock.step():
        work(1)
        with clock.phase("quantise"):
            work(2)
        with clock.phase("wait"):
            work(3)
        work(4)
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "compute": 5, "quantise": 2, "wait": 3}
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


def test_what_is_compiled_in_a_phase_or_beside_it_is_no_work(work):
    clock = Clock()
    with clock.step():
        work(1, compiling=10)
        with clock.phase("quantise"):
            work(2, compiling=12)
        work(0, compiling=3)
    found = clock.take()
    assert {name: found[name] for name in ("compute", "quantise", "compile")} == {
        "compute": 1, "quantise": 2, "compile": 25,
    }  # fmt: skip
    with clock.step(), clock.phase("wait"):
        work(3)
    assert clock.take()["compile"] == 0


def test_a_phase_outside_steps_counts_too(work):
    clock = Clock()
    with clock.phase("assign"):
        work(2, compiling=5)
    found = clock.take()
    assert (found["assign"], found["compile"], found["compute"]) == (2, 5, 0)
