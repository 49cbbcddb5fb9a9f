"""Pipelines under `meshyard-swift run` that lose stages, against the same run undisturbed."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUM = 4


def train(
    driver, folder, faults=(), *, spares=1, log=None, helpers=0, is_logged=True, heartbeat_s=5, status=0,
    **more,
):  # fmt: skip
    folder.mkdir()
    options = {
        **more,
        "faults": list(faults),
        "helpers": helpers,
        "log": (log or {}) if is_logged else None,
    }
    (folder / "options.json").write_text(json.dumps(options))
    words = ["-n", NUM, "--spares", spares, "--heartbeat", heartbeat_s, "--report", "report.json"]
    printed = driver.run(folder, *words, HERE / "lost_stages.py", folder, status=status)
    if status:
        return printed
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM)]


@pytest.fixture(scope="module")
def undisturbed(driver, tmp_path_factory):
    return train(driver, tmp_path_factory.mktemp("run") / "a")


def fault(rank, point, step=None, bucket=None, recovery=0):
    return {"rank": rank, "recovery": recovery, "point": point, "step": step, "bucket": bucket}


CASES = {
    "middle": ([fault(1, "backward", 6, 3)], [[[1], [4, 5]]]),
    "first, before a checkpoint": ([fault(0, "backward", 2, 0)], [[[0], [0, 1]]]),
    "last, done": ([fault(3, "finish", 6)], [[[3], [4, 5, 6]]]),
}
SLOW = {
    "neighbours": ([fault(2, "backward", 7, 0), fault(1, "join", recovery=1)], [[[1, 2], [4, 5, 6]]]),
    "in its replay": ([fault(1, "backward", 6, 3), fault(1, "replay", recovery=1)], [[[1], [4, 5]]]),
    "a neighbour in its replay": (
        [fault(1, "backward", 6, 3), fault(2, "replay", recovery=1)], [[[1, 2], [4, 5]]],
    ),
    "one after another": (
        [fault(1, "backward", 6, 3), fault(2, "backward", 9, 5, recovery=1)], [[[2], [8]]],
    ),
}  # fmt: skip


def check(driver, folder, undisturbed, faults, replayed, **options):
    found = train(driver, folder, faults, **options)
    assert [one["digest"] for one in found] == [one["digest"] for one in undisturbed]
    assert all(one["recoveries"] for one in found)
    for one in found:
        assert one["replayed"] == replayed
    assert list((folder / "log").rglob("*")) == [], "no log is left behind"
    return found


@pytest.mark.parametrize(
    "case", ["middle", *(pytest.param(one, marks=pytest.mark.slow) for one in list(CASES)[1:])]
)
def test_a_lost_stage_is_replayed_bit_for_bit(driver, tmp_path, undisturbed, case):
    check(driver, tmp_path / "b", undisturbed, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_several_losses_are_replayed_bit_for_bit(driver, tmp_path, undisturbed, case):
    check(driver, tmp_path / "b", undisturbed, *SLOW[case], spares=2)


def test_of_the_logs_the_newest_two_intervals_are_kept(undisturbed):
    assert [one["logs"] for one in undisturbed] == [["000001.log", "000002.log"]] * NUM


@pytest.mark.slow
def test_stages_are_killed_and_stopped_at_every_other_point(driver, tmp_path, undisturbed):
    lost = [
        fault(1, "checkpoint", 3),
        fault(0, "commit", 4, recovery=1),
        fault(1, "forward", 5, recovery=2),
        fault(2, "mark", 6, recovery=3),
        fault(2, "load", recovery=4),
        fault(3, "backward", 7, 1, recovery=5) | {"kind": "stop"},
        fault(1, "join", recovery=6) | {"kind": "stop"},
    ]
    found = train(driver, tmp_path / "b", lost, spares=5, heartbeat_s=1.5)
    assert [one["digest"] for one in found] == [one["digest"] for one in undisturbed]
    told = json.loads((tmp_path / "b" / "report.json").read_text())["failures"]
    assert [one["rank"] for failure in told for one in failure["lost"]] == [1, 0, 1, 2, 2, 3, 1]


@pytest.mark.slow
def test_a_stage_that_is_ahead_takes_its_step_back(driver, tmp_path, undisturbed):
    # The last stage has made the step by then; the first two wait for the last micro-batch's gradient.
    lost = [fault(2, "backward", 9, 5) | {"after_s": 0.5}]
    found = check(driver, tmp_path / "b", undisturbed, lost, [[[2], [8]]])
    assert [one["recoveries"][0]["target"] for one in found] == [9] * NUM
    undone = [one["recoveries"][0]["undone"] for one in found]
    assert undone[3] > 0
    assert undone[:2] == [0, 0]


@pytest.mark.slow
def test_a_replay_that_differs_ends_the_run_with_iteration_stage_and_tensor(driver, tmp_path):
    lost = [fault(1, "backward", 2, 0)]
    printed = train(driver, tmp_path / "b", lost, status=1, strays=True)
    told = (
        "the replay of stage 1 differs from training in iteration 0: the first tensor is the "
        "activation of micro-batch 0, whose digest"
    )
    assert printed.count(told) == 1, printed


@pytest.mark.slow
def test_helpers_and_joined_stages_replay_bit_for_bit(driver, tmp_path, undisturbed):
    lost = [fault(0, "backward", 7, 1)]
    check(driver, tmp_path / "b", undisturbed, lost, [[[0], [4, 5, 6]]], helpers=1)
    lost = [fault(0, "backward", 7, 1), fault(2, "backward", recovery=1)]  # the helper
    replayed = [[[0], [4, 5, 6]], [[2], [4, 5, 6]]]
    check(driver, tmp_path / "d", undisturbed, lost, replayed, helpers=1, spares=2)
    lost = [fault(2, "backward", 7, 1)]
    logged = {"logged": [True, False, True]}
    check(driver, tmp_path / "c", undisturbed, lost, [[[1, 2], [4, 5, 6]]], log=logged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"is_logged": False}, "nothing is logged"),
        ({"log": {"budget": "2KiB"}}, "the budget of 2.00 KiB is used up"),
    ],
    ids=["no log", "budget"],
)
def test_without_a_whole_log_all_go_back_to_the_checkpoint(
    driver, tmp_path, undisturbed, options, why
):
    found = check(driver, tmp_path / "b", undisturbed, [fault(1, "backward", 6, 3)], [], **options)
    for one in found:
        assert one["recoveries"][0]["target"] == 4
        assert "no logs that reach 6: " in one["recoveries"][0]["reason"]
        assert one["recoveries"][0]["reason"].endswith(why)


@pytest.mark.slow
def test_with_a_log_of_another_run_all_go_back_to_the_checkpoint(driver, tmp_path, undisturbed):
    lost = [fault(1, "backward", 6, 3)]
    found = check(driver, tmp_path / "b", undisturbed, lost, [[[1], [4, 5]]], swaps_log=[0, 5])
    for one in found:
        (told,) = one["recoveries"]
        assert told["target"] == 4
        assert (
            "got run 'another'; give each run a folder of its own; all ranks went" in told["reason"]
        )


@pytest.mark.slow
def test_a_damaged_log_between_two_lost_stages_takes_all_back(driver, tmp_path, undisturbed):
    """Who serves both tells the second hole's ranks, too, what the first one's lack."""
    lost = [fault(1, "backward", 6, 3), fault(3, "join", recovery=1)]
    replayed = [[[1], [4, 5]], [[3], [4, 5]]]
    options = {"swaps_log": [2, 5], "spares": 2}
    found = check(driver, tmp_path / "b", undisturbed, lost, replayed, **options)
    for one in found:
        assert one["recoveries"][-1]["target"] == 4
        assert "got run 'another'" in one["recoveries"][-1]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["join", "verify"])
def test_a_stage_that_is_lost_before_the_first_step_is_built_again(
    driver, tmp_path, undisturbed, point
):
    check(driver, tmp_path / "b", undisturbed, [fault(1, point)], [[[1], []]])
