"""Pipelines under `meshyard-swift run` that lose stages, against the same run undisturbed."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUM = 4


def train(driver, folder, faults=(), *, spares=1, log=None, helpers=0, is_logged=True, **more):
    folder.mkdir()
    options = {
        **more,
        "faults": list(faults),
        "helpers": helpers,
        "log": (log or {}) if is_logged else None,
    }
    (folder / "options.json").write_text(json.dumps(options))
    driver.run(folder, "-n", NUM, "--spares", spares, HERE / "lost_stages.py", folder)
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
@pytest.mark.parametrize("options", [{"is_logged": False}, {"log": {"budget": "2KiB"}}], ids=str)
def test_without_a_whole_log_all_go_back_to_the_checkpoint(driver, tmp_path, undisturbed, options):
    found = check(driver, tmp_path / "b", undisturbed, [fault(1, "backward", 6, 3)], [], **options)
    assert all(one["recoveries"][0]["target"] == 4 for one in found)


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
@pytest.mark.parametrize("point", ["join", "verify"])
def test_a_stage_that_is_lost_before_the_first_step_is_built_again(
    driver, tmp_path, undisturbed, point
):
    check(driver, tmp_path / "b", undisturbed, [fault(1, point)], [[[1], []]])
