"""Ranks are killed and stopped at every point: each state that follows is an undisturbed run's."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import launching
import pytest
from launching import STEPS

from swift.report import PHASES

BUCKETS = 3


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
    # By the last one the others have updated two buckets.
    last = {
        "rank": 1,
        "recovery": 11,
        "step": STEPS - 1,
        "point": "start",
        "bucket": 2,
        "after_s": 0.3,
    }
    faults = [*draw_faults(0, 11), last]
    driver.train(tmp_path, "-n", "3", "--spares", "4", steps=STEPS, faults=faults)
    assert launching.states(tmp_path) == undisturbed()
    told = launching.failures(tmp_path)
    # One recovery repairs two losses when the second comes before its end.
    lost = [one for failure in told for one in failure["lost"]]
    assert [one["rank"] for one in lost] == [one["rank"] for one in faults]
    assert sum(rank["undone"] for one in told for rank in one["ranks"].values()) > 0
    assert all("SIGKILL" in one["how"] for one in lost)
    for rank in (rank for one in told for rank in one["ranks"].values()):
        assert set(rank["seconds"]) == set(PHASES)
        assert rank["received_bytes"] > 0 or not rank["is_newcomer"]


def test_kills_while_it_recovers_and_sgd_with_clipping(driver, tmp_path, undisturbed):
    given = {"optimizer": "sgd", "clip_norm": 0.1, "is_built_unlike": True}
    faults = [
        {"rank": 2, "recovery": 0, "point": "transfer"},
        {"rank": 1, "recovery": 1, "step": 0, "point": "start", "bucket": 2},
        {"rank": 0, "recovery": 2, "point": "join"},
        {"rank": 2, "recovery": 3, "step": 4, "point": "mark"},
        {"rank": 0, "recovery": 4, "point": "undo"},
        {"rank": 1, "recovery": 5, "step": 7, "point": "reduce", "bucket": 2},
        {"rank": 0, "recovery": 6, "point": "transfer"},
        {"rank": 0, "recovery": 7, "step": 11, "point": "forward"},
        {"rank": 2, "recovery": 8, "point": "verify"},
    ]
    options = ("-n", "3", "--spares", "5")
    printed = driver.train(tmp_path, *options, steps=STEPS, faults=faults, **given)
    line = r"(meshyard-swift: (rank \d was killed by signal 9 \(SIGKILL\)[,;] )+(a spare|the others).*\n)+"
    assert re.fullmatch(line, printed), printed
    told = check(tmp_path, undisturbed(**given), 4)
    lost = [[one["rank"] for one in failure["lost"]] for failure in told]
    assert lost == [[2, 1, 0], [2, 0], [1, 0], [0, 2]]
    assert "wait for its last sum: clip_norm" in (tmp_path / "report-0").read_text()


def test_kills_under_torchs_own_backward_and_step(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 1, "recovery": 0, "step": 1, "point": "start", "bucket": 2},
        {"rank": 2, "recovery": 1, "step": 4, "point": "reduce", "bucket": 1},
        {"rank": 0, "recovery": 2, "step": 6, "point": "update", "bucket": 0, "after_s": 0.2},
        {"rank": 1, "recovery": 3, "step": 9, "point": "finish"},
    ]
    given = {"steps": STEPS, "idiom": True}
    driver.train(tmp_path, "-n", "3", "--spares", "3", faults=faults, **given)
    told = check(tmp_path, undisturbed(idiom=True), 4)
    assert all(not one["difference"] for each in told for one in each["ranks"].values())


def test_a_torn_step_that_is_repeated_otherwise_is_said(driver, tmp_path):
    # The others have updated two buckets by then, and wait for the third.
    faults = [{"rank": 2, "recovery": 0, "step": 3, "point": "start", "bucket": 2, "after_s": 1.0}]
    given = {"steps": 5, "iterates": True, "faults": faults}
    printed = driver.train(tmp_path, "-n", "3", "--spares", "1", **given)
    for rank in range(2):
        assert f"rank {rank}: step 3 was repeated, but its gradients differ from those" in printed
    (told,) = launching.failures(tmp_path)
    assert [
        "difference" in one and bool(one["difference"]) for one in told["ranks"].values()
    ].count(True) == 2
    assert "Rank 0: step 3 was repeated" in (tmp_path / "report-0").read_text()


@pytest.mark.parametrize(
    "point",
    ["join", *(pytest.param(one, marks=pytest.mark.slow) for one in ("load", "verify"))],
)
def test_a_kill_while_it_resumes_does_not_begin_again(driver, tmp_path, undisturbed, point):
    driver.train(tmp_path, "-n", "3", "--spares", "0", steps=4, checkpoint=4)
    (tmp_path / "states").unlink()
    # The others have it, once it is loaded; else the second loss comes as they begin once more.
    ranks = (1,) if point == "load" else (1, 2)
    faults = [{"rank": rank, "recovery": rank - 1, "point": point} for rank in ranks]
    options = ("-n", "3", "--spares", "2")
    driver.train(tmp_path, *options, steps=6, checkpoint=4, faults=faults)
    expected = undisturbed()
    assert launching.states(tmp_path) == {step: expected[step] for step in (4, 5, 6)}
    (told,) = launching.failures(tmp_path)
    assert [one["rank"] for one in told["lost"]] == list(ranks)


@pytest.mark.slow
def test_a_rank_that_cannot_undo_takes_its_state_from_others(driver, tmp_path, undisturbed):
    # The others have updated two buckets by then.
    faults = [{"rank": 2, "recovery": 0, "step": 5, "point": "start", "bucket": 2, "after_s": 0.3}]
    given = {"steps": STEPS, "spoils": [1, 5], "faults": faults}
    driver.train(tmp_path, "-n", "3", "--spares", "1", **given)
    (told,) = check(tmp_path, undisturbed(), 1)
    assert re.search(
        r"rank 1 counts as lost, as it could not undo: .*'grad' was changed in place",
        told["reason"],
    )
    ranks = told["ranks"]
    assert ranks["0"]["undone"] > 0
    assert ranks["1"]["undone"] == ranks["0"]["received_bytes"] == 0
    assert ranks["1"]["received_bytes"] == ranks["2"]["received_bytes"] > 0


@pytest.mark.slow
def test_a_state_that_was_changed_aside_ends_the_run_at_the_next_recovery(driver, tmp_path):
    faults = [{"rank": 2, "recovery": 0, "step": 5, "point": "start", "bucket": 0}]
    given = {"steps": STEPS, "strays": [1, 4], "faults": faults}
    printed = driver.train(tmp_path, "-n", "3", "--spares", "1", status=1, **given)
    assert printed.count("ranks [1] differ from rank 0, whose state they replicate") == 1, printed


@pytest.mark.slow
def test_survivors_keep_no_connection_of_worlds_that_are_lost(driver, tmp_path):
    faults = [
        {"rank": 2, "recovery": at, "step": 2 * at + 2, "point": "start", "bucket": 1}
        for at in range(5)
    ]
    given = {"steps": STEPS, "faults": faults, "step_s": 0.02}
    driver.train(tmp_path, "-n", "3", "--spares", "5", **given)
    for rank in range(2):
        counts = json.loads((tmp_path / f"sockets-{rank}").read_text())
        assert len(counts) == 6
        assert counts[-1] <= counts[1], counts


@pytest.mark.slow
@pytest.mark.parametrize("point", ["join", "transfer", "verify"])
def test_ranks_that_are_built_unlike_begin_alike_whoever_dies(driver, tmp_path, point):
    faults = [{"rank": 0, "recovery": 0, "point": point}]
    given = {"steps": 3, "is_built_unlike": True}
    driver.train(tmp_path, "-n", "3", "--spares", "1", faults=faults, **given)
    found = launching.states(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(len(states) == 1 for states in found.values())
    assert [one["rank"] for one in launching.failures(tmp_path)[0]["lost"]] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_hundred_kills(driver, tmp_path, undisturbed, seed, optimizer):
    faults = draw_faults(seed, 7)
    driver.train(
        tmp_path, "-n", "3", "--spares", "4", steps=STEPS, faults=faults, optimizer=optimizer
    )
    assert launching.states(tmp_path) == undisturbed(optimizer=optimizer)
    assert sum(len(one["lost"]) for one in launching.failures(tmp_path)) == 7


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"clip_norm": 0.1}, {"mode": "commit"}], ids=str)
def test_updates_that_wait_for_all_sums(driver, tmp_path, undisturbed, given):
    points = ["vote", "update"] if "mode" in given else ["update", "reduce"]
    faults = [
        {"rank": 1, "recovery": 0, "step": 3, "point": points[0], "bucket": None},
        {"rank": 0, "recovery": 1, "step": 5, "point": points[1], "bucket": 2},
    ]
    driver.train(tmp_path, "-n", "3", "--spares", "2", steps=STEPS, faults=faults, **given)
    check(tmp_path, undisturbed(**given), 2)
    told = (tmp_path / "report-0").read_text()
    assert f"wait for its last sum: {'clip_norm' if 'clip_norm' in given else 'the vote'}" in told


@pytest.mark.slow
def test_arithmetic_undo_differs(driver, tmp_path, undisturbed):
    """The control: what rounds is seen."""
    fault = {"rank": 1, "recovery": 0, "step": 5, "point": "start", "bucket": 2, "after_s": 0.3}
    faults = [fault]  # the others have updated two buckets by then
    given = {"mode": "arith"}
    expected = undisturbed(**given)
    driver.train(tmp_path, "-n", "3", "--spares", "1", steps=STEPS, faults=faults, **given)
    found = launching.states(tmp_path)
    assert sum(one["undone"] for one in launching.failures(tmp_path)[0]["ranks"].values()) > 0
    assert [found[step] == expected[step] for step in (5, STEPS)] == [False, False]


@pytest.mark.slow
def test_what_arithmetic_would_undo_is_fetched_where_somebody_still_has_it(
    driver, tmp_path, undisturbed
):
    # Rank 0 has updated the first bucket by then, rank 1 none.
    faults = [{"rank": 2, "recovery": 0, "step": 5, "point": "start", "bucket": 1, "after_s": 0.3}]
    given = {"mode": "arith", "lags": [1, 5]}
    driver.train(tmp_path, "-n", "3", "--spares", "1", steps=STEPS, faults=faults, **given)
    (told,) = check(tmp_path, undisturbed(mode="arith"), 1)
    assert told["target"] == 5
    assert sum(rank["undone"] for rank in told["ranks"].values()) == 0
    assert told["ranks"]["0"]["received_bytes"] > 0
    assert told["ranks"]["1"]["received_bytes"] == 0


@pytest.mark.slow
def test_a_stopped_rank_is_fenced_and_replaced(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 0, "recovery": 0, "step": 3, "point": "reduce", "bucket": 1, "kind": "stop"},
        {"rank": 2, "recovery": 1, "step": 6, "point": "update", "bucket": 0, "kind": "stop"},
    ]
    options = ("-n", "3", "--spares", "2", "--heartbeat", "1.5")
    driver.train(tmp_path, *options, steps=STEPS, faults=faults)
    for failure in check(tmp_path, undisturbed(), 2):
        # The silence counts: the others stood still meanwhile.
        assert all(1.5 <= rank["seconds"]["detect"] < 2 for rank in failure["ranks"].values())


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stopped_rank_that_is_continued(driver, tmp_path, undisturbed, is_late):
    """In time it goes on as if nothing had been; later it is no more, and has written nothing."""
    fault = {"rank": 0, "recovery": 0, "step": 3, "point": "reduce", "bucket": 1, "kind": "stop"}
    given = {"steps": STEPS, "faults": [fault], "step_s": 0.02}
    options = ("-n", "3", "--spares", "1", "--heartbeat", "1.5" if is_late else "20")
    driver.begin(tmp_path, *launching.arguments(tmp_path, *options, **given))
    launching.wait_for_step(tmp_path, 3)
    pid = wait_until_stopped(tmp_path, 0)
    told = lines_of(tmp_path, pid)
    if is_late:
        launching.wait_for_step(tmp_path, 5)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    else:
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
    driver.end()
    check(tmp_path, undisturbed(), int(is_late))
    assert (lines_of(tmp_path, pid) == told) == is_late


def lines_of(folder, pid):
    """What a process has told."""
    return [
        line for line in (folder / "states").read_text().splitlines() if line.endswith(f" {pid}")
    ]


def wait_until_stopped(folder, rank):
    """The process of a rank, once it is stopped."""
    lines = [line.split() for line in (folder / "states").read_text().splitlines()]
    pid = next(int(line[4]) for line in lines if line[2] == str(rank))
    deadline = time.monotonic() + launching.LIMIT_S
    while (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pid


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_or_committed(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 1, "recovery": 0, "step": 3, "point": "checkpoint"},
        {"rank": 0, "recovery": 1, "step": 7, "point": "commit"},
    ]
    driver.train(tmp_path, "-n", "3", "--spares", "2", steps=STEPS, faults=faults, checkpoint=4)
    check(tmp_path, undisturbed(), 2)
    marks = sorted((tmp_path / "checkpoints").glob("step-*/COMMITTED"))
    assert [one.parent.name for one in marks] == ["step-12", "step-16"]


@pytest.mark.slow
def test_when_all_ranks_are_lost_the_run_stops_and_resumes_from_its_checkpoint(
    driver, tmp_path, undisturbed
):
    faults = [{"rank": rank, "recovery": 0, "step": 6, "point": "forward"} for rank in range(3)]
    options = ("-n", "3", "--spares", "3", "--wait", "20")
    printed = driver.train(tmp_path, *options, steps=STEPS, faults=faults, checkpoint=4)
    found = launching.states(tmp_path)
    assert found == undisturbed()
    reasons = [one["reason"] for one in launching.failures(tmp_path)]
    assert "no rank has survived" in reasons[-1]
    told = "all ranks go back to the checkpoint: no rank has survived with a parameter"
    assert printed.count(told) == 1


@pytest.mark.slow
def test_two_ranks_are_killed_at_once_and_a_scaler_goes_on(driver, tmp_path, undisturbed):
    """Also in a step whose gradients overflow, which changes no weight."""
    given = {"overflows": [4]}
    faults = [
        {"rank": 0, "recovery": 0, "step": 4, "point": "update", "bucket": 1},
        {"rank": 2, "recovery": 0, "step": 4, "point": "update", "bucket": 1},
        # The two may be seen at once or one after another.
        {"rank": 1, "recovery": 1, "step": 4, "point": "update", "bucket": 0},
        {"rank": 1, "recovery": 2, "step": 4, "point": "reduce", "bucket": 2},
    ]
    driver.train(tmp_path, "-n", "3", "--spares", "4", steps=STEPS, faults=faults, **given)
    found = launching.states(tmp_path)
    assert found == undisturbed(**given)
    lost = [one["rank"] for told in launching.failures(tmp_path) for one in told["lost"]]
    assert sorted(set(lost)) == [0, 1, 2]


@pytest.mark.slow
def test_fewer_ranks_go_on_where_that_is_allowed(driver, tmp_path, undisturbed):
    faults = [{"rank": 1, "recovery": 0, "step": 3, "point": "forward"}]
    options = ("-n", "3", "--spares", "0", "--wait", "0.01")
    printed = driver.train(tmp_path, *options, "--min-ranks", "2", steps=STEPS, faults=faults)
    assert (
        "goes on with 2 ranks in place of 3, as --min-ranks allows: the result differs" in printed
    )
    found, expected = launching.states(tmp_path), undisturbed()
    assert all(len(states) == 1 for states in found.values())
    same = [found[step] == expected[step] for step in range(STEPS + 1)]
    # A survivor may not have ended step 2 yet, which fewer ranks then repeat.
    assert all(same[:3])
    assert not any(same[4:])
    (told,) = launching.failures(tmp_path)
    assert told["world_size"] == 2

    (tmp_path / "stops").mkdir()
    printed = driver.train(tmp_path / "stops", *options, status=1, steps=STEPS, faults=faults)
    assert "no spare came in 0.01 s for rank 1; start the run again" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("code", "script: expected "),
        ("settings", "threads: expected 1, got 2"),
        ("processor", "processor[1]: expected "),
    ],
)
def test_a_spare_that_would_not_reach_the_same_bits_is_refused(driver, tmp_path, turns, expected):
    script = tmp_path / "training.py"
    script.write_bytes(launching.SCRIPT.read_bytes())
    faults = [{"rank": 1, "recovery": 0, "step": 3, "point": "forward"}]
    given = {"steps": STEPS, "faults": faults, "turns": turns}
    options = ("-n", "3", "--spares", "0")
    printed = driver.train(tmp_path, *options, script=script, status=1, **given)
    refusal = "a spare on host 0 is refused: it would not reach the same bits: "
    assert printed.count(refusal + expected) == 1, printed
    assert printed.count("refused") == 1
    assert "no spare came for rank 1; start the run again" in printed


@pytest.mark.slow
def test_a_slow_rank_is_told_from_a_dead_one(driver, tmp_path, undisturbed):
    """One that sends no heartbeats, but is not stopped, has four times the limit."""
    options = ("-n", "3", "--spares", "1", "--heartbeat", "0.5")
    printed = driver.train(tmp_path, *options, steps=STEPS, holds_s=1.2)
    assert "rank 1 runs, but has sent nothing for 0." in printed
    check(tmp_path, undisturbed(), 0)
    driver.train(tmp_path / "dead", *options, steps=STEPS, holds_s=30)
    (told,) = check(tmp_path / "dead", undisturbed(), 1)
    assert told["lost"][0]["how"].startswith("was killed")


@pytest.mark.slow
def test_without_spares_a_replacement_is_started(driver, tmp_path, undisturbed):
    faults = [{"rank": 1, "recovery": 0, "step": 3, "point": "forward"}]
    driver.train(tmp_path, "-n", "3", "--spares", "0", steps=STEPS, faults=faults)
    check(tmp_path, undisturbed(), 1)
