"""Ranks are killed and stopped at every point: each state that follows is an undisturbed run's."""

import json
import random
import signal
import subprocess
import sys
import time

import launching
import pytest

STEPS = 16
BUCKETS = 3


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    found = launching.Driver(tmp_path_factory.mktemp("driver") / "log")
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(driver, tmp_path_factory):
    """Digest of each step of a run without faults, by optimizer and options; each once."""
    known = {}

    def states(**given):
        key = json.dumps(given, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            driver.run(folder, "-n", "3", "--spares", "0", steps=STEPS, **given)
            assert launching.failures(folder) == []
            known[key] = launching.states(folder)
            assert sorted(known[key]) == list(range(STEPS + 1))
            assert all(len(found) == 1 for found in known[key].values())
        return known[key]

    return states


def draw_faults(seed, count, **more):
    """Kills in one run, one after another, over rank x bucket x step; some while it recovers."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(STEPS), count))
    return [
        {
            "rank": draw.randrange(3),
            "recovery": number,
            "step": step,
            "point": (
                point := draw.choice(["forward", "start", "start", "reduce", "update", "finish"])
            ),
            "bucket": draw.randrange(BUCKETS) if point in ("start", "reduce", "update") else None,
            **more,
        }
        for number, step in enumerate(steps)
    ]


def check(folder, expected, num_failures):
    found = launching.states(folder)
    assert found == expected
    told = launching.failures(folder)
    assert len(told) == num_failures
    return told


@pytest.mark.slow
def test_twelve_kills_in_one_run_leave_every_state_as_it_was(driver, tmp_path, undisturbed):
    faults = draw_faults(0, 12)
    driver.run(tmp_path, "-n", "3", "--spares", "4", steps=STEPS, faults=faults)
    told = check(tmp_path, undisturbed(), 12)
    assert [one["lost"][0]["rank"] for one in told] == [one["rank"] for one in faults]
    assert sum(rank["undone"] for one in told for rank in one["ranks"].values()) > 0
    assert all("SIGKILL" in one["lost"][0]["how"] for one in told)


@pytest.mark.slow
def test_kills_while_it_recovers_and_sgd(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 1, "recovery": 0, "step": 0, "point": "start", "bucket": 2},
        {"rank": 0, "recovery": 1, "point": "join"},
        {"rank": 2, "recovery": 2, "step": 4, "point": "update", "bucket": 2},
        {"rank": 0, "recovery": 3, "point": "undo"},
        {"rank": 1, "recovery": 4, "step": 7, "point": "reduce", "bucket": 2},
        {"rank": 1, "recovery": 5, "point": "transfer"},
        {"rank": 0, "recovery": 6, "step": 11, "point": "forward"},
        {"rank": 2, "recovery": 7, "point": "verify"},
    ]
    driver.run(tmp_path, "-n", "3", "--spares", "5", steps=STEPS, faults=faults, optimizer="sgd")
    check(tmp_path, undisturbed(optimizer="sgd"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_hundred_kills(driver, tmp_path, undisturbed, seed, optimizer):
    faults = draw_faults(seed, 7)
    driver.run(
        tmp_path, "-n", "3", "--spares", "4", steps=STEPS, faults=faults, optimizer=optimizer
    )
    check(tmp_path, undisturbed(optimizer=optimizer), 7)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"clip_norm": 0.1}, {"mode": "commit"}], ids=str)
def test_updates_that_wait_for_all_sums(driver, tmp_path, undisturbed, given):
    points = ["vote", "update"] if "mode" in given else ["update", "reduce"]
    faults = [
        {"rank": 1, "recovery": 0, "step": 3, "point": points[0], "bucket": None},
        {"rank": 0, "recovery": 1, "step": 5, "point": points[1], "bucket": 2},
    ]
    driver.run(tmp_path, "-n", "3", "--spares", "2", steps=STEPS, faults=faults, **given)
    check(tmp_path, undisturbed(**given), 2)


@pytest.mark.slow
def test_arithmetic_undo_differs(driver, tmp_path, undisturbed):
    """The control: what rounds is seen."""
    faults = [{"rank": 1, "recovery": 0, "step": 5, "point": "start", "bucket": 2}]
    given = {"mode": "arith"}
    expected = undisturbed(**given)
    driver.run(tmp_path, "-n", "3", "--spares", "1", steps=STEPS, faults=faults, **given)
    found = launching.states(tmp_path)
    assert sum(one["undone"] for one in launching.failures(tmp_path)[0]["ranks"].values()) > 0
    assert [found[step] == expected[step] for step in (5, STEPS)] == [False, False]


@pytest.mark.slow
def test_a_stopped_rank_is_fenced_and_replaced(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 0, "recovery": 0, "step": 3, "point": "reduce", "bucket": 1, "kind": "stop"},
        {"rank": 2, "recovery": 1, "step": 6, "point": "update", "bucket": 0, "kind": "stop"},
    ]
    options = ("-n", "3", "--spares", "2", "--heartbeat", "1.5")
    driver.run(tmp_path, *options, steps=STEPS, faults=faults)
    check(tmp_path, undisturbed(), 2)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_or_committed(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 1, "recovery": 0, "step": 3, "point": "checkpoint"},
        {"rank": 0, "recovery": 1, "step": 7, "point": "commit"},
    ]
    driver.run(tmp_path, "-n", "3", "--spares", "2", steps=STEPS, faults=faults, checkpoint=4)
    check(tmp_path, undisturbed(), 2)
    marks = sorted((tmp_path / "checkpoints").glob("step-*/COMMITTED"))
    assert [one.parent.name for one in marks] == ["step-12", "step-16"]


@pytest.mark.slow
def test_when_all_ranks_are_lost_the_run_stops_and_resumes_from_its_checkpoint(
    driver, tmp_path, undisturbed
):
    faults = [{"rank": rank, "recovery": 0, "step": 6, "point": "forward"} for rank in range(3)]
    options = ("-n", "3", "--spares", "3", "--wait", "20")
    driver.run(tmp_path, *options, steps=STEPS, faults=faults, checkpoint=4)
    found = launching.states(tmp_path)
    assert found == undisturbed()
    reasons = [one["reason"] for one in launching.failures(tmp_path)]
    assert "no rank has survived" in reasons[-1]


@pytest.mark.slow
def test_without_spares_a_replacement_is_started(driver, tmp_path, undisturbed):
    faults = [{"rank": 1, "recovery": 0, "step": 3, "point": "forward"}]
    driver.run(tmp_path, "-n", "3", "--spares", "0", steps=STEPS, faults=faults)
    check(tmp_path, undisturbed(), 1)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_and_the_run_resumes(driver, tmp_path, undisturbed):
    process = launching.launch(
        tmp_path, "-n", "3", "--spares", "1", steps=STEPS, checkpoint=4, step_s=0.2
    )
    wait_for_step(tmp_path, 9)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert launching.wait_until_gone(process.pid) == []
    before = launching.states(tmp_path)
    driver.run(tmp_path, "-n", "3", "--spares", "0", steps=STEPS, checkpoint=4)
    assert launching.states(tmp_path) == undisturbed()
    assert max(before) < STEPS


@pytest.mark.slow
def test_status_and_inject(driver, tmp_path, undisturbed):
    process = launching.launch(tmp_path, "-n", "3", "--spares", "1", steps=STEPS, step_s=0.3)
    wait_for_step(tmp_path, 4)
    told = json.loads(ask("status", "--json"))
    assert sorted(one["rank"] for one in told["processes"] if one["rank"] is not None) == [0, 1, 2]
    assert "kill: rank 2" in ask("inject", "kill", "2")
    launching.finish(process, tmp_path)
    check(tmp_path, undisturbed(), 1)


def ask(*words):
    command = [sys.executable, "-m", "swift", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def wait_for_step(folder, step):
    deadline = time.monotonic() + 60
    while not (folder / "states").exists() or max(launching.states(folder)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)
