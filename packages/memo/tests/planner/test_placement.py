"""Plans within budgets: against every plan there is where these are few, and by what must always hold."""

import functools
import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_profiles import ITEMS, TILES, UNIT, layer_profile, step_profile

from memo.config import Budget, DoesNotFit
from memo.planner.footprint import footprint
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.placement import check_possible, fits, place
from memo.planner.plan import Plan
from memo.planner.profile import ItemProfile, PassBytes, least_layer
from memo.simulator import simulate
from shared.errors import ConfigError, DataError

pytestmark = pytest.mark.unchecked  # a plan looks at hundreds


def planned(profile, device, store=0, name="memory"):
    return place(profile, Budget(device * UNIT, store * UNIT), name, predict=simulate)


def test_with_room_to_spare_nothing_is_paid():
    plan = planned(step_profile(rate=1e9), 1000, 1000)
    assert {layer.mode for layer in plan.layers} == {"keep"}
    assert plan.prediction["step_s"] == pytest.approx(plan.prediction["kept_s"])


def test_without_a_store_what_saves_most_seconds_a_byte_stays():
    profile = step_profile()
    least = 100 + 6 + 1 + 26  # fixed, inputs, working set of a backward
    plan = planned(profile, least + 6)
    assert plan.prediction["peak_bytes"] <= (least + 6) * UNIT
    assert any("attention" in layer.resident for layer in plan.layers)
    assert all("query" not in layer.resident for layer in plan.layers)


def test_a_fast_store_is_preferred_to_computing_again():
    plan = planned(step_profile(rate=1e9), 160, 1000)
    assert plan.prediction["store_bytes"] > 0
    assert plan.prediction["step_s"] < plan.prediction["recomputed_s"] - 0.5


def test_a_slow_store_is_not_used():
    slow = planned(step_profile(rate=1e5), 140, 1000)
    without = planned(step_profile(), 140)
    assert slow.prediction["step_s"] <= without.prediction["step_s"] + 1e-9


def ways(has_store):
    names = [name for name, _, _ in ITEMS]
    yield LayerPlan()
    for num in range(len(names)):
        yield LayerPlan(mode="restore", resident=frozenset(names[: num + 1]))
        if has_store:
            yield LayerPlan(mode="restore", stored=dict.fromkeys(names[: num + 1], 1.0))


@functools.cache
def every_assignment(rate):
    """What each assignment to three layers holds, and how long its step takes: of no budget."""
    profile = step_profile(num_layers=3, rate=rate)
    plans = (
        Plan(layers=layers) for layers in itertools.product(list(ways(rate is not None)), repeat=3)
    )
    return [(footprint(plan, profile), simulate(plan, profile).step_s) for plan in plans]


@pytest.mark.parametrize("device", [128, 132, 140, 150, 170])
@pytest.mark.parametrize(("rate", "store"), [(None, 0), (3e7, 1000), (1e9, 1000), (1e9, 9)])
def test_no_assignment_of_whole_items_to_three_layers_is_faster_by_much(device, rate, store):
    profile = step_profile(num_layers=3, rate=rate)
    budget = Budget(device * UNIT, store * UNIT)
    best = min(
        (
            step_s
            for held, step_s in every_assignment(rate)
            if held.peak_bytes <= budget.device_bytes and held.store_bytes <= budget.store_bytes
        ),
        default=None,
    )
    if best is None:
        with pytest.raises(DoesNotFit):
            place(profile, budget, "memory", predict=simulate)
        return
    plan = place(profile, budget, "memory", predict=simulate)
    # Three runs of layers are not all assignments: what they miss is told, and small.
    assert plan.prediction["step_s"] <= best * 1.025
    assert plan.prediction["peak_bytes"] <= budget.device_bytes


@given(
    device=st.integers(120, 260),
    store=st.integers(0, 80),
    rate=st.floats(1e6, 1e10),
    num_layers=st.integers(1, 8),
)
def test_plans_hold_both_limits_and_are_never_slower_than_computing_all_again(
    device, store, rate, num_layers
):
    profile = step_profile(rate=rate, num_layers=num_layers)
    is_possible = fits(profile, Budget(device * UNIT, store * UNIT))
    try:
        plan = planned(profile, device, store)
    except DoesNotFit:
        assert not is_possible
        again = Plan(
            layers=(LayerPlan(mode="restore", resident=frozenset({"input"})),) * num_layers
        )
        assert footprint(again, profile).peak_bytes > device * UNIT
        return
    assert is_possible
    told = footprint(plan, profile)
    assert told.peak_bytes == plan.prediction["peak_bytes"] <= device * UNIT
    assert told.store_bytes == plan.prediction["store_bytes"] <= store * UNIT
    again = Plan(layers=(LayerPlan(mode="restore", resident=frozenset({"input"})),) * num_layers)
    if footprint(again, profile).peak_bytes <= device * UNIT:
        assert plan.prediction["step_s"] <= plan.prediction["recomputed_s"] + 1e-9


@pytest.mark.parametrize(("share", "is_again"), [(0.985, True), (0.975, False)])
def test_computing_everything_again_wins_ties(share, is_again):
    """By a replay that says what each plan takes, as disturbed seconds might."""
    again = LayerPlan(mode="restore", resident=frozenset({"input"}))

    def predict(plan, profile):
        seconds = 10.0 if all(one == again for one in plan.layers) else 10.0 * share
        return replace(simulate(plan, profile), step_s=seconds)

    plan = place(step_profile(), Budget(1000 * UNIT, 0), "memory", predict=predict)
    assert (all(one == again for one in plan.layers)) == is_again
    assert plan.prediction["step_s"] == (10.0 if is_again else 10.0 * share)


@given(low=st.integers(125, 200), more=st.integers(0, 80))
def test_more_memory_never_makes_a_step_slower(low, more):
    profile = step_profile(rate=2e8, num_layers=4)
    try:
        first = planned(profile, low, 60).prediction["step_s"]
    except DoesNotFit:
        return
    assert planned(profile, low + more, 60).prediction["step_s"] <= first + 1e-9


def test_layers_that_another_forward_would_change_are_stored_whole():
    changed = layer_profile(can_replay=False)
    # Two on their way out beside the loss, and two buffers: 191; six kept take 220 and more.
    plan = planned(step_profile(rate=1e9, layer=changed), 191, 1000)
    assert {one.mode for one in plan.layers} <= {"keep", "whole"}
    assert any(one.mode == "whole" for one in plan.layers)


def test_what_does_not_fit_says_by_how_much_and_what_would_help():
    with pytest.raises(DoesNotFit) as caught:
        planned(step_profile(), 120)
    text = str(caught.value)
    assert "expected at most 120 MiB on the device, got 132 MiB for 1,600 tokens" in text
    assert "a batch of about" in text
    assert "Budget(store=...)" in text
    with pytest.raises(DoesNotFit, match="shard them") as caught:
        planned(step_profile(), 90)
    assert "100 MiB of them are there throughout" in str(caught.value)
    assert "Budget(store=...)" not in str(caught.value), "it would not help"


def test_whether_anything_fits_is_asked_of_both_limits():
    """With one of six inputs on the device its backward takes 27, beside two buffers and two on their way."""
    profile = step_profile(rate=1e9)
    assert fits(profile, Budget(131 * UNIT, 5 * UNIT))
    assert planned(profile, 131, 5).prediction["store_bytes"] == 5 * UNIT
    assert not fits(profile, Budget(131 * UNIT, 4 * UNIT))
    with pytest.raises(
        DoesNotFit, match=r"at most 4\.00 MiB in the store, got 6\.00 MiB for 1,600"
    ):
        planned(profile, 131, 4)


@given(data=st.data(), store=st.integers(0, 80))
def test_what_fits_is_never_refused_by_what_every_plan_takes_at_least(data, store):
    """Of layers that have all they save when their backward begins, and something beside."""
    sizes = st.integers(1, 12)
    items = tuple(
        ItemProfile(name=name, num_bytes=data.draw(sizes) * UNIT, recompute_s=0.1)
        for name in (INPUT, ATTENTION, "query", "up")
    )
    saved = sum(one.num_bytes for one in items) + data.draw(sizes) * UNIT
    there = itertools.accumulate(one.num_bytes for one in items)
    levels = tuple(
        PassBytes(
            forward=data.draw(sizes) * UNIT,
            backward=max(0, saved - one) + data.draw(st.integers(0, 4)) * UNIT,
        )
        for one in there
    )
    profile = step_profile(rate=1e9, num_layers=data.draw(st.integers(1, 5)))
    real = profile.with_layers(
        lambda layer: replace(layer, items=items, saved_bytes=saved, levels=levels)
    )
    known = {one.name: one.num_bytes for one in items}
    least = profile.with_layers(
        lambda layer: least_layer(1600, layer.input_bytes, known, saved, layer.kept)
    )
    budget = Budget(data.draw(st.integers(100, 400)) * UNIT, store * UNIT)
    if fits(real, budget):
        check_possible(least, budget)


def test_what_every_plan_takes_at_least_is_what_is_saved_and_not_there_yet():
    kept = PassBytes(forward=0, backward=0)
    layer = least_layer(8, 3, {INPUT: 3, ATTENTION: 2, "up": 9}, 10, kept)
    assert [one.num_bytes for one in layer.items] == [3, 2]
    assert [(one.forward, one.backward) for one in layer.levels] == [(0, 7), (0, 5)]


def test_tiles_are_chosen_where_nothing_else_fits():
    profile = step_profile(tiles=TILES)
    with_room = planned(profile, 132)
    assert all(layer.mode != "tiles" for layer in with_room.layers)
    plan = planned(profile, 128)
    assert any(layer.mode == "tiles" for layer in plan.layers)
    assert plan.prediction["peak_bytes"] <= 128 * UNIT
    assert fits(profile, Budget(128 * UNIT))
    with pytest.raises(DoesNotFit):
        planned(step_profile(), 128)
    assert not fits(step_profile(), Budget(128 * UNIT))


def test_tiles_take_their_own_seconds_and_bytes():
    profile = step_profile(tiles=TILES, head_bytes=UNIT)
    layer = LayerPlan(mode="tiles", tile_rows=100, resident=frozenset({"input"}))
    plan = Plan(layers=(layer,) * 6)
    found = simulate(plan, profile)
    assert found.step_s == pytest.approx(6 * (0.6 + 1.4 + 0.2) + 0.1)
    assert found.peak_bytes == (100 + 6 + 8) * UNIT
    with_attention = LayerPlan(
        mode="tiles", tile_rows=100, resident=frozenset({"input", "attention"})
    )
    found = simulate(Plan(layers=(with_attention,) * 6), profile)
    assert found.step_s == pytest.approx(6 * (0.6 + 1.4) + 0.1)
    assert found.peak_bytes == (100 + 12 + 8) * UNIT


def test_tiles_without_a_profile_of_them_are_refused():
    layer = LayerPlan(mode="tiles", tile_rows=100, resident=frozenset({"input"}))
    with pytest.raises(ConfigError, match="expected a profile of tiles"):
        simulate(Plan(layers=(layer,) * 6), step_profile())


def test_a_loss_in_blocks_that_saves_less_than_a_twentieth_is_not_chosen():
    profile = step_profile(head_s=0.5, block_head_s=0.1, block_head_bytes=UNIT)
    assert not planned(profile, 1000).has_block_loss
    much = step_profile(head_s=0.7, block_head_s=0.1, block_head_bytes=UNIT)
    assert planned(much, 1000).has_block_loss


def test_a_loss_in_blocks_is_chosen_where_its_room_saves_a_twentieth():
    profile = step_profile(head_bytes=100 * UNIT, block_head_s=0.2, block_head_bytes=UNIT)
    tight = planned(profile, 100 + 6 * 20 + 26)
    assert tight.has_block_loss
    assert not planned(profile, 1000).has_block_loss
    loose = planned(step_profile(head_bytes=100 * UNIT), 100 + 6 * 20 + 26)
    assert tight.prediction["step_s"] <= 0.95 * loose.prediction["step_s"]


def test_a_plan_in_words_names_layers_items_and_bytes():
    text = planned(step_profile(rate=1e9), 160, 1000).explain()
    assert "layers 0-" in text
    assert "store input" in text
    assert "MiB  parameters, gradients, optimizer" in text
    assert Plan.fixed(alpha=0.5).explain().endswith("nothing was predicted: a fixed plan")


def test_plans_come_back_from_their_files(tmp_path):
    plan = planned(step_profile(rate=1e9), 160, 1000)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alpha": "half"}, "alpha: expected a fraction in [0, 1], got 'half'; give a number such as 0.5"),
        ({"alpha": None}, "alpha: expected a fraction in [0, 1], got None; give a number such as 0.5"),
        ({"alpha": 1.5}, "alpha: expected a fraction in [0, 1], got 1.5; give a number such as 0.5"),
        ({"alpha": math.nan}, "alpha: expected a fraction in [0, 1], got nan; give a number such as 0.5"),
        (
            {"alpha": 0.5, "store": "banana"},
            "plan.store: expected 'memory', 'pinned' or 'file:DIR', got 'banana'; take one of these",
        ),
        (
            {"alpha": 0.5, "store": 3},
            "plan.store: expected 'memory', 'pinned' or 'file:DIR', got 3; take one of these",
        ),
    ],
)  # fmt: skip
def test_settings_of_a_fixed_plan_are_checked(settings, text):
    with pytest.raises(ConfigError) as caught:
        Plan.fixed(**settings)
    assert str(caught.value) == text


def test_layers_of_a_plan_are_plans():
    for layers in ("keep", ("keep",), LayerPlan(), ()):
        with pytest.raises(
            ConfigError, match=r"plan\.layers: expected a tuple of one LayerPlan or more, got"
        ):
            Plan(layers=layers)
    with pytest.raises(
        ConfigError, match=r"layer\.stored\['up'\]: expected a fraction in \[0, 1\], got nan"
    ):
        LayerPlan(mode="restore", stored=dict.fromkeys(["up"], math.nan))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": None}, "budget.device: expected a size such as '6GiB', got None; state one"),
        ({"device": "1GiB", "store": []}, "budget.store: expected a size such as '6GiB', got []; state one"),
        (
            {"device": "1GiB", "store_at": "/tmp"},
            "budget.store_at: expected 'memory', 'pinned' or 'file:DIR', got '/tmp'; for a folder write 'file:/tmp'",
        ),
    ],
)  # fmt: skip
def test_settings_of_a_budget_are_checked(settings, text):
    with pytest.raises(ConfigError) as caught:
        Budget(**settings)
    assert str(caught.value) == text


def test_paths_that_are_no_files_are_named(tmp_path):
    text = f"{tmp_path}: expected a plan, got a folder; name a file"
    with pytest.raises(DataError) as caught:
        Plan.load(tmp_path)
    assert str(caught.value) == text
    with pytest.raises(
        DataError, match=r"none.json: expected a plan, there is nothing; check the path"
    ):
        Plan.load(tmp_path / "none.json")
    path = tmp_path / "none" / "plan.json"
    text = f"{path}: expected a file that can be written, got: No such file or directory; name one in a folder"
    with pytest.raises(DataError, match=text):
        Plan.fixed(alpha=0.5).save(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"store_limit_bytes": "3"},
            "plan.store_limit_bytes: expected whole bytes or None, got '3'",
        ),
        ({"layers": 7}, "'int' object is not iterable"),
        ({"layers": [{"mode": "keep"}]}, "expected mode, resident"),
        ({"cut": "16"}, "plan.cut: expected a whole number"),
        ({"format": 0}, "expected a plan of format 1, got format 0"),
    ],
)
def test_files_that_are_no_plans_are_named(tmp_path, change, text):
    path = tmp_path / "plan.json"
    Plan.fixed(alpha=0.5).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=f"{path}: .*{text}"):
        Plan.load(path)
