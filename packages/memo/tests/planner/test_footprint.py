"""Bytes of plans: by hand, and by carrying schedules out with copies that take as long as they may."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_profiles import ITEMS, UNIT, layer_profile, step_profile

from memo.planner.footprint import footprint, layer_footprint
from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.planner.profile import ItemProfile, LayerProfile, PassBytes
from memo.planner.schedule import schedule

PAGE = 4096
NAMES = [name for name, _, _ in ITEMS]
STORE_ALL = LayerPlan(mode="restore", stored=dict.fromkeys(NAMES, 1.0))
AGAIN = LayerPlan(mode="restore", resident=frozenset({"input"}))
KEEP = LayerPlan()


def test_where_all_is_stored_one_layer_is_on_its_way_and_two_have_buffers():
    profile = step_profile(rate=1e9, head_bytes=UNIT)
    held = footprint(Plan(layers=(STORE_ALL,) * 6), profile)
    assert held.store_bytes == 6 * 9 * UNIT
    assert held.parts == {
        "parameters, gradients, optimizer": 100 * UNIT,
        "given to all layers": 0,
        "buffers": 2 * 9 * UNIT,
        "held by layers": 0,
        "on their way out": 9 * UNIT,
        "working": (2 + 14) * UNIT,
    }
    assert held.peak_bytes == (100 + 18 + 9 + 16) * UNIT
    assert held.peak_at == "forward of layer 1"


def test_the_loss_may_meet_all_that_is_on_its_way():
    held = footprint(Plan(layers=(STORE_ALL,) * 6), step_profile(rate=1e9, head_bytes=50 * UNIT))
    assert held.peak_at == "loss"
    assert held.peak_bytes == (100 + 18 + 2 * 9 + 1 + 50) * UNIT
    sooner = Plan(layers=(STORE_ALL,) * 6, max_sending=1)
    held = footprint(sooner, step_profile(rate=1e9, head_bytes=50 * UNIT))
    assert held.peak_bytes == (100 + 18 + 9 + 1 + 50) * UNIT


def test_without_a_store_inputs_stay_and_the_first_backward_is_the_peak():
    held = footprint(Plan(layers=(AGAIN,) * 6), step_profile())
    assert held.peak_at == "backward of layer 5"
    assert held.peak_bytes == (100 + 6 + 26) * UNIT
    assert held.store_bytes == 0


def test_what_is_given_to_all_layers_is_there_throughout():
    plan, profile = Plan(layers=(AGAIN,) * 6), step_profile()
    given = footprint(plan, replace(profile, given_bytes=5 * UNIT))
    assert given.parts["given to all layers"] == 5 * UNIT
    assert given.peak_bytes == footprint(plan, profile).peak_bytes + 5 * UNIT


def test_embeddings_are_there_beside_the_input_of_all_layers_but_the_first():
    layer = layer_profile(kept=PassBytes(forward=21 * UNIT, backward=0))
    for count, inputs in ((1, 1), (2, 2)):
        profile = step_profile(head_bytes=0, layer=layer, num_layers=count)
        held = footprint(Plan(layers=(KEEP,) * count), profile)
        assert held.peak_at == f"forward of layer {count - 1}"
        assert held.peak_bytes == (100 + 20 * (count - 1) + inputs + 21) * UNIT


def test_items_that_are_sent_are_there_whole_until_then():
    half = LayerPlan(mode="restore", stored={"input": 1.0, "gate": 0.5})
    held = footprint(Plan(layers=(half,) * 6), step_profile(rate=1e9, head_bytes=50 * UNIT))
    assert held.peak_at == "loss"
    assert held.parts["on their way out"] == 2 * (1 + 3) * UNIT


def test_bytes_of_items_out_of_order_are_what_each_one_changes():
    there = LayerPlan(mode="restore", resident=frozenset({"input", "gate", "query"}))
    found = one_layer(there)
    assert found.forward_bytes == (6 + 2 * 2) * UNIT
    assert found.backward_bytes == (26 - 2) * UNIT


def one_layer(plan, num_bytes=5000, rows=100, cut=16):
    layer = layer_profile(num_tokens=rows)
    items = tuple(replace(item, num_bytes=num_bytes) for item in layer.items)
    return layer_footprint(plan, replace(layer, items=items), cut)


def test_what_is_stored_takes_whole_pages():
    found = one_layer(LayerPlan(mode="restore", stored={"input": 1.0, "gate": 1.0}))
    assert found.stored_bytes == found.buffer_bytes == 2 * 2 * PAGE
    assert found.resident_bytes == 0


def test_some_rows_take_a_buffer_for_all_and_spare_their_share_of_seconds():
    found = one_layer(
        LayerPlan(mode="restore", stored={"input": 1.0, "gate": 0.5}), num_bytes=20 * PAGE
    )
    rows = 48  # of 100: the multiple of 16 below a half
    assert found.stored_bytes == (20 + 10) * PAGE, "9.6 pages are 10"
    assert found.buffer_bytes == (20 + 20) * PAGE
    again = 0.2 + 0.08 + 0.01 + (1 - rows / 100) * 0.09
    assert found.replay_s == pytest.approx(0.05 + again)


def test_an_input_without_a_place_stays():
    found = one_layer(LayerPlan(mode="restore", stored={"attention": 1.0}))
    assert found.resident_bytes == 5000
    assert found.stored_bytes == 2 * PAGE
    assert found.forward_bytes == (6 + 2) * UNIT, "two items are there"


WAYS = st.sampled_from(
    [
        KEEP,
        AGAIN,
        STORE_ALL,
        LayerPlan(mode="whole"),
        LayerPlan(mode="restore", resident=frozenset({"input", "attention"})),
        LayerPlan(mode="restore", stored={"input": 1.0, "attention": 1.0, "gate": 0.7}),
        LayerPlan(mode="restore", resident=frozenset({"input"}), stored={"attention": 1.0}),
    ]
)
BYTES = st.integers(1, 40_000)
PASSES = st.builds(PassBytes, forward=BYTES, backward=BYTES)


@st.composite
def kinds(draw):
    items = tuple(ItemProfile(name=one, num_bytes=draw(BYTES), recompute_s=0.1) for one in NAMES)
    return LayerProfile(
        num_tokens=draw(st.integers(1, 100)),
        input_bytes=draw(BYTES),
        items=items,
        saved_bytes=draw(BYTES),
        forward_s=1.0,
        backward_s=2.0,
        replay_s=0.1,
        kept=draw(PASSES),
        levels=tuple(draw(PASSES) for _ in items),
    )


@st.composite
def profiles(draw, num_layers):
    """Steps of layers of up to three kinds, in any order."""
    chosen = st.sampled_from([draw(kinds()) for _ in range(draw(st.integers(1, 3)))])
    layers = tuple(draw(st.lists(chosen, min_size=num_layers, max_size=num_layers)))
    sizes = {name: draw(BYTES) for name in ("head_bytes", "forward_bytes", "outer_bytes")}
    return step_profile(layers=layers, fixed_bytes=7, **sizes)


def most_bytes(plan, profile):
    """Move by move, with each copy out taking as long as the schedule lets it."""
    moves = schedule(plan.layers, max_sending=plan.max_sending, num_buffers=plan.num_buffers)
    pairs = zip(plan.layers, profile.layers, strict=True)
    layers = [layer_footprint(one, kind, plan.cut) for one, kind in pairs]
    held, peak = 0, profile.outer_bytes
    on_their_way = {}

    def look(working):
        nonlocal peak
        peak = max(peak, held + sum(on_their_way.values()) + working)

    for number, layer in enumerate(layers):
        for move in moves.before_forward[number]:
            assert move.action == "await_sent"
            for sent in [one for one in on_their_way if one <= move.layer]:  # sent in order
                del on_their_way[sent]
        embeddings = 0 if number == 0 else profile.forward_bytes
        look(embeddings + profile.layers[number].input_bytes + layer.forward_bytes)
        held += layer.resident_bytes
        for move in moves.after_forward[number]:
            if move.action == "send":
                on_their_way[number] = layer.buffer_bytes
    look(profile.layers[-1].input_bytes + profile.head_bytes)
    for layer in reversed(layers):
        if layer.stored_bytes:  # it is back: it and all before it were sent
            on_their_way.clear()
        look(layer.backward_bytes)
        held -= layer.resident_bytes
    buffers = sorted((layer.buffer_bytes for layer in layers), reverse=True)[: plan.num_buffers]
    return peak + sum(buffers) + profile.fixed_bytes


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_a_peak_is_that_of_a_step_carried_out(data, max_sending, num_buffers):
    runs = data.draw(st.lists(st.tuples(WAYS, st.integers(1, 5)), min_size=1, max_size=4))
    layers = tuple(way for way, count in runs for _ in range(count))
    profile = data.draw(profiles(len(layers)))
    plan = Plan(layers=layers, max_sending=max_sending, num_buffers=num_buffers)
    assert footprint(plan, profile).peak_bytes == most_bytes(plan, profile)
