import pytest

from shared.errors import ConfigError
from swift.membership.coordinator import Coordinator, Process
from swift.membership.settings import Settings

PRINT = {"code": "a", "training": {"parameters": ["w [2]"], "can_shrink": True}}
PART = {**PRINT, "training": {"can_shrink": False}}
KILLED = "was killed by signal 9 (SIGKILL)"


def started(num_ranks=3, num_spares=1, hosts=1, fingerprint=PRINT, **settings):
    """A coordinator whose ranks are all ready, and what it said last."""
    settings = {"min_ranks": num_ranks, "wait_s": 10.0, **settings}
    found = Coordinator(Settings(num_ranks=num_ranks, **settings), store=("h", 1))
    for at in range(num_ranks):
        found.add(Process(f"r{at}", at % hosts, at))
    for at in range(num_spares):
        found.add(Process(f"s{at}", at % hosts, None))
    said = []
    for name in list(found.processes):
        said += ready(found, name, fingerprint)
    return found, said


def ready(coordinator, name, fingerprint=PRINT):
    return coordinator.hear(name, {"kind": "ready", "fingerprint": fingerprint}, 0.0)


def worlds(said):
    return {to: (m["rank"], m["epoch"], m["world_size"]) for to, m in said if m["kind"] == "world"}


def kinds(said):
    return {to: m["kind"] for to, m in said}


def test_the_first_world_begins_when_all_ranks_are_ready():
    _, said = started()
    assert worlds(said) == {"r0": (0, 0, 3), "r1": (1, 0, 3), "r2": (2, 0, 3)}


def test_a_ready_spare_takes_the_place_of_a_lost_rank():
    coordinator, _ = started()
    said = coordinator.lose(["r1"], KILLED, None, 5.0)
    assert worlds(said) == {"r0": (0, 1, 3), "r2": (2, 1, 3), "s0": (1, 1, 3)}
    assert said[0].message["lost"] == [{"rank": 1, "how": KILLED, "ago_s": 0.0, "host": 0}]


def test_a_loss_is_dated_from_the_last_sign_of_life_on_one_clock():
    coordinator, _ = started(num_ranks=2, num_spares=0)
    coordinator.lose(["r1"], "was cut off", None, 5.0, silent_s=1.5)
    coordinator.add(Process("s9", 0, None))
    (world, _) = coordinator.hear("s9", {"kind": "ready", "fingerprint": PRINT}, 7.0)
    assert world.message["lost"][0]["ago_s"] == 7.0 - (5.0 - 1.5)


def unready(num_ranks=2, **settings):
    """A coordinator whose ranks are all started, and none ready."""
    settings = {"min_ranks": num_ranks, "wait_s": 10.0, **settings}
    found = Coordinator(Settings(num_ranks=num_ranks, **settings), store=("h", 1))
    for at in range(num_ranks):
        found.add(Process(f"r{at}", at, at))
    return found


def test_a_rank_lost_before_the_first_world_is_waited_for_and_no_spare_takes_its_place():
    coordinator = unready()
    coordinator.add(Process("s0", 0, None))
    ready(coordinator, "s0")
    assert coordinator.lose(["r1"], KILLED, None, 1.0) == []
    assert ready(coordinator, "r0") == []
    assert coordinator.tick(10.9) == []
    coordinator.add(Process("r1b", 1, 1))
    assert coordinator.tick(100.0) == []
    assert coordinator.ended is None
    said = ready(coordinator, "r1b")
    assert worlds(said) == {"r0": (0, 0, 2), "r1b": (1, 0, 2)}
    assert said[0].message["lost"] == []


@pytest.mark.parametrize("min_ranks", [1, 2])
def test_a_host_that_does_not_come_back_before_the_first_world_ends_the_run(min_ranks):
    coordinator = unready(min_ranks=min_ranks)
    coordinator.expect_no_spare()
    coordinator.lose(["r1"], "was cut off", None, 1.0)
    assert coordinator.tick(10.9) == []
    assert coordinator.ended is None
    assert coordinator.tick(11.0) == []
    assert "no process came in 10 s for rank 1; start the run again" in coordinator.ended


def test_of_two_that_are_lost_before_the_first_world_both_are_waited_for():
    coordinator = unready(num_ranks=3)
    coordinator.lose(["r1", "r2"], "was cut off", None, 1.0)
    coordinator.add(Process("r1b", 1, 1))
    coordinator.tick(11.0)
    assert "no process came in 10 s for rank 2;" in coordinator.ended


def test_losses_before_the_first_world_stop_the_run():
    coordinator = unready(most_failures=3)
    for at in range(4):
        assert (coordinator.ended, coordinator.num_losses) == (None, at)
        coordinator.lose(["r0"], KILLED, None, 0.0)
        coordinator.add(Process("r0", 0, 0))
    assert "ranks were lost 4 times before the first step; find out what" in coordinator.ended


def test_worlds_behind_the_first_are_recoveries_and_interruptions_are_not():
    coordinator = unready()
    assert coordinator.num_recoveries == 0
    coordinator, _ = started(num_spares=0)
    assert coordinator.num_recoveries == 0
    coordinator.lose(["r0"], KILLED, None, 1.0)
    coordinator.add(Process("s9", 0, None))
    ready(coordinator, "s9")
    assert (coordinator.epoch, coordinator.num_recoveries) == (2, 1)


def test_a_spare_of_the_same_host_is_preferred():
    coordinator, _ = started(num_ranks=2, num_spares=2, hosts=2)
    assert worlds(coordinator.lose(["r1"], KILLED, None, 0.0))["s1"] == (1, 1, 2)


def test_a_spare_that_is_not_ready_is_waited_for():
    coordinator, _ = started(num_spares=0)
    coordinator.add(Process("s9", 0, None))
    assert kinds(coordinator.lose(["r0"], KILLED, None, 1.0)) == dict.fromkeys(
        ["r1", "r2"], "interrupt"
    )
    assert coordinator.tick(10.9) == []
    assert worlds(ready(coordinator, "s9")) == {"r1": (1, 2, 3), "r2": (2, 2, 3), "s9": (0, 2, 3)}
    assert coordinator.tick(1000.0) == []
    assert coordinator.ended is None


def test_losses_of_a_recovery_that_did_not_end_are_told_with_the_next():
    coordinator, _ = started(num_spares=3)
    coordinator.lose(["r0"], KILLED, None, 1.0)
    said = coordinator.lose(["r1"], KILLED, None, 2.0)
    assert [one["rank"] for one in said[0].message["lost"]] == [0, 1]
    # Heartbeats come all the time; a step of the world before it may be told late.
    for beat in ({"step": 4}, {"step": 4, "epoch": 1}):
        coordinator.hear("r2", {"kind": "beat", **beat}, 3.0)
    said = coordinator.lose(["s0"], KILLED, None, 3.5)
    assert [one["rank"] for one in said[0].message["lost"]] == [0, 1, 0]
    assert coordinator.continued == {1, 2}
    coordinator.hear("r2", {"kind": "beat", "step": 4, "epoch": coordinator.epoch}, 3.6)
    coordinator.add(Process("s9", 0, None))
    ready(coordinator, "s9")
    said = coordinator.lose(["r2"], KILLED, None, 4.0)
    assert [one["rank"] for one in said[0].message["lost"]] == [2]
    assert coordinator.continued == {1, 2}


def test_where_no_spare_can_come_lost_ranks_are_not_waited_for():
    coordinator, _ = started(num_spares=0)
    coordinator.expect_no_spare()
    assert coordinator.tick(0.5) == []
    coordinator.lose(["r2"], KILLED, None, 1.0)
    assert coordinator.tick(1.0) == []
    assert "no spare came for rank 2; start the run again" in coordinator.ended


def test_a_script_that_never_trains_is_told_how():
    coordinator, _ = started()
    coordinator.lose(["r1"], "ended with status 0", 0, 0.0)
    assert "rank 1 ended with status 0 before all steps were done; its script" in coordinator.ended
    assert "without run.loop" in coordinator.ended


def test_a_rank_lost_while_others_wait_is_waited_for_too():
    coordinator, _ = started(num_spares=0)
    coordinator.lose(["r0"], KILLED, None, 1.0)
    assert kinds(coordinator.lose(["r1"], KILLED, None, 2.0)) == {"r2": "interrupt"}
    for name in ("s1", "s2"):
        coordinator.add(Process(name, 0, None))
    assert ready(coordinator, "s1") == []
    assert worlds(ready(coordinator, "s2")) == {"r2": (2, 3, 3), "s1": (0, 3, 3), "s2": (1, 3, 3)}


def test_without_a_spare_the_run_stops_at_the_deadline_and_says_how_to_go_on():
    coordinator, _ = started(num_spares=0)
    coordinator.lose(["r2"], KILLED, None, 1.0)
    assert coordinator.tick(10.9) == []
    assert coordinator.tick(11.0) == []
    assert "no spare came in 10 s for rank 2; start the run again" in coordinator.ended


def test_fewer_ranks_go_on_where_that_is_allowed():
    coordinator, _ = started(num_spares=0, min_ranks=2)
    coordinator.lose(["r0"], KILLED, None, 1.0)
    assert worlds(coordinator.tick(11.0)) == {"r1": (0, 2, 2), "r2": (1, 2, 2)}
    coordinator.lose(["r2"], KILLED, None, 20.0)
    coordinator.tick(30.0)
    assert "no spare came" in coordinator.ended


@pytest.mark.parametrize(("min_ranks", "is_refused"), [(2, True), (3, False)])
def test_fewer_ranks_are_refused_where_each_holds_a_part(min_ranks, is_refused):
    coordinator, _ = started(min_ranks=min_ranks, fingerprint=PART)
    assert (coordinator.epoch == -1) == is_refused
    text = "--min-ranks: expected it for replicas of whole models only, got 2 for a model of which"
    assert (coordinator.ended or "").startswith(text) == is_refused


def test_a_whole_host_is_lost_at_once():
    coordinator, _ = started(num_ranks=4, num_spares=2, hosts=2)
    said = coordinator.lose(["r1", "r3", "s1"], "was cut off", None, 0.0)
    assert "r3" not in kinds(said)
    assert kinds(said) == {"r0": "interrupt", "r2": "interrupt", "s0": "interrupt"}


def test_a_script_that_fails_stops_the_run():
    coordinator, _ = started()
    assert coordinator.lose(["r1"], "ended with status 1", 1, 0.0) == []
    assert "rank 1 ended with status 1 before all steps were done" in coordinator.ended


def test_all_are_released_once_all_have_finished():
    coordinator, _ = started()
    for name in ("r0", "r1"):
        assert coordinator.hear(name, {"kind": "finished", "epoch": 0}, 0.0) == []
    said = coordinator.hear("r2", {"kind": "finished", "epoch": 0}, 0.0)
    assert kinds(said) == {"r0": "release", "r1": "release", "r2": "release", "s0": "stop"}
    for name in ("r0", "r1", "s0", "r2"):
        assert coordinator.ended is None
        coordinator.lose([name], "ended with status 0", 0, 0.0)
    assert coordinator.ended == ""


def test_a_rank_lost_while_others_have_finished_is_replaced():
    coordinator, _ = started()
    coordinator.hear("r0", {"kind": "finished", "epoch": 0}, 0.0)
    assert worlds(coordinator.lose(["r1"], KILLED, None, 0.0))["s0"] == (1, 1, 3)
    # What was finished in the old world does not count in the new one.
    coordinator.hear("r2", {"kind": "finished", "epoch": 0}, 0.0)
    coordinator.hear("r2", {"kind": "finished", "epoch": 1}, 0.0)
    assert coordinator.hear("s0", {"kind": "finished", "epoch": 1}, 0.0) == []
    assert not coordinator.is_released


def test_a_rank_that_finished_the_old_world_late_is_waited_for_in_the_new_one():
    coordinator, _ = started()
    coordinator.lose(["r1"], KILLED, None, 0.0)
    coordinator.hear("r2", {"kind": "finished", "epoch": 0}, 0.0)
    for name in ("r0", "s0"):
        assert coordinator.hear(name, {"kind": "finished", "epoch": 1}, 0.0) == []
    assert coordinator.hear("r2", {"kind": "finished", "epoch": 1}, 0.0) != []
    assert coordinator.is_released


def test_a_loss_after_the_last_step_is_said():
    coordinator, _ = started()
    for name in ("r0", "r1", "r2"):
        coordinator.hear(name, {"kind": "finished", "epoch": 0}, 0.0)
    coordinator.lose(["r1"], KILLED, None, 0.0)
    assert coordinator.ended == f"rank 1 {KILLED} after the last step"


def test_a_spare_unlike_the_ranks_is_refused_with_the_difference():
    coordinator, _ = started()
    coordinator.add(Process("s9", 3, None))
    other = {"code": "a", "training": {"parameters": ["w [3]"]}}
    ((to, message),) = ready(coordinator, "s9", other)
    assert (to, message["kind"], message["status"]) == ("s9", "stop", 1)
    assert (
        "host 3 is refused: it would not reach the same bits: training.parameters[0]: expected "
        "'w [2]', got 'w [3]'" in message["reason"]
    )
    coordinator.lose(["r0"], KILLED, None, 0.0)
    assert "s9" not in coordinator.processes


def test_a_rank_unlike_the_first_stops_the_run():
    coordinator = Coordinator(Settings(num_ranks=2, min_ranks=2), store=("h", 1))
    for at in range(2):
        coordinator.add(Process(f"r{at}", 0, at))
    ready(coordinator, "r0")
    ready(coordinator, "r1", {**PRINT, "code": "b"})
    assert "rank 1 differs from the first rank that was ready: code: expected 'a', got 'b'" in (
        coordinator.ended
    )


def test_losses_without_a_step_between_them_stop_the_run():
    coordinator, _ = started(num_spares=9, most_failures=3)
    for at in range(3):
        name = next(one.name for one in coordinator.processes.values() if one.rank == 0)
        coordinator.hear("r1", {"kind": "beat", "step": at}, 0.0)
        coordinator.lose([name], KILLED, None, 0.0)
    for _ in range(3):
        assert coordinator.ended is None
        name = next(one.name for one in coordinator.processes.values() if one.rank == 0)
        coordinator.lose([name], KILLED, None, 0.0)
    assert "lost 4 times at step 2 and none got past it; find" in coordinator.ended


@pytest.mark.parametrize(
    "given",
    [{"timeout_s": 0.0}, {"wait_s": -1.0}, {"timeout_s": float("nan")}, {"wait_s": float("nan")}],
)
def test_limits_are_above_zero(given):
    with pytest.raises(
        ConfigError, match=r"expected a --timeout above 0 s, of at most 1e.07 s, and a --wait"
    ):
        Settings(num_ranks=3, min_ranks=3, **given)


def test_min_ranks_has_a_range():
    with pytest.raises(ConfigError, match="--min-ranks: expected 1 to the 3 ranks, got 4"):
        Settings(num_ranks=3, min_ranks=4)


def test_ranks_that_are_lost_at_once_are_one_failure():
    coordinator, _ = started(num_ranks=8, num_spares=9, most_failures=3)
    for at in range(6):
        coordinator.lose([f"r{at}"], KILLED, None, 0.01 * at)
    assert (coordinator.ended, coordinator.num_losses) == (None, 1)
    # Those that took their places are lost at the same step: each time one more failure.
    for at in range(2, 4):
        name = next(one.name for one in coordinator.processes.values() if one.rank == 0)
        coordinator.lose([name], KILLED, None, float(at))
        assert (coordinator.ended, coordinator.num_losses) == (None, at)
    assert sorted(
        one.rank for one in coordinator.processes.values() if one.rank is not None
    ) == list(range(8))
    # So is one of the first ones that is lost later.
    coordinator.lose(["r7"], KILLED, None, 9.0)
    assert "ranks were lost 4 times at step 0 and none got past it" in coordinator.ended


def test_a_spare_that_is_ready_before_the_ranks_is_compared_with_them():
    coordinator = unready()
    other = {**PRINT, "code": "b"}
    for name, fingerprint in (("s0", other), ("s1", PRINT)):
        coordinator.add(Process(name, 0, None))
        assert ready(coordinator, name, fingerprint) == []
    (refusal,) = ready(coordinator, "r0")
    assert refusal.to == "s0"
    assert "code: expected 'a', got 'b'; start it with" in refusal.message["reason"]
    assert kinds(ready(coordinator, "r1")) == dict.fromkeys(["r0", "r1"], "world")
    assert coordinator.ended is None
    assert worlds(coordinator.lose(["r1"], KILLED, None, 1.0))["s1"] == (1, 1, 2)


def test_a_spare_that_waits_for_others_knows_its_place():
    """So that its host starts another one."""
    coordinator, _ = started(num_ranks=4, num_spares=1)
    said = coordinator.lose(["r0", "r1"], KILLED, None, 0.0)
    assert {to: (m["kind"], m["rank"]) for to, m in said} == {
        "r2": ("interrupt", 2),
        "r3": ("interrupt", 3),
        "s0": ("interrupt", 0),
    }
