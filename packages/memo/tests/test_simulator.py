"""Replayed steps against sums that one can do by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_profiles import UNIT, step_profile

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.simulator import simulate
from shared.errors import ConfigError

EVERYTHING = dict.fromkeys(("input", "attention", "gate", "up", "query"), 1.0)
STORE_ALL = LayerPlan(mode="restore", stored=EVERYTHING)


def test_kept_layers_take_their_passes_and_nothing_else():
    found = simulate(Plan(layers=(LayerPlan(),)), step_profile())
    assert found.step_s == pytest.approx(6 * 1.5 + 0.1)
    assert found.exposed_s == pytest.approx(0)
    assert found.store_bytes == found.replayed_s == 0


def test_full_recomputation_adds_a_layers_forward_to_each_backward():
    plan = Plan(layers=(LayerPlan(mode="restore", resident=frozenset({"input"})),))
    again = 0.05 + 0.2 + 0.09 + 0.08 + 0.01
    found = simulate(plan, step_profile())
    assert found.replayed_s == pytest.approx(6 * again)
    assert found.step_s == pytest.approx(6 * (1.5 + again) + 0.1)


def test_copies_that_hide_cost_what_is_computed_again_alone():
    found = simulate(Plan(layers=(STORE_ALL,)), step_profile(rate=1e12))
    assert found.step_s == pytest.approx(6 * (1.5 + 0.05) + 0.1, abs=1e-3)
    assert found.store_bytes == 6 * 9 * UNIT


def test_streams_hold_what_is_sent_until_they_are_awaited():
    plan = Plan(layers=(STORE_ALL,))
    quick, streams = (
        simulate(replace(plan, store=store), step_profile(rate=1e12))
        for store in ("memory", "pinned")
    )
    assert streams.expected_peak_bytes == streams.peak_bytes == quick.peak_bytes
    assert quick.expected_peak_bytes < quick.peak_bytes


def test_slow_copies_bound_the_step_from_below():
    rate = 9 * UNIT / 2.0  # two seconds a layer, each way; a forward takes half of one
    found = simulate(Plan(layers=(STORE_ALL,)), step_profile(rate=rate))
    assert found.step_s >= 2 * 6 * 2.0
    assert found.exposed_s == pytest.approx(found.step_s - (6 * 1.55 + 0.1))


def test_passes_are_slower_beside_copies_only():
    fast, slow = (step_profile(rate=1e12, slowdown=factor) for factor in (1.0, 1.5))
    passes = 6 * 1.55
    assert simulate(Plan(layers=(STORE_ALL,)), slow).step_s == pytest.approx(
        simulate(Plan(layers=(STORE_ALL,)), fast).step_s + 0.5 * passes, abs=1e-3
    )
    assert simulate(Plan(layers=(LayerPlan(),)), slow).step_s == pytest.approx(9.1)


def test_a_block_loss_has_its_own_seconds():
    profile = step_profile(block_head_s=0.4, block_head_bytes=UNIT)
    plain = simulate(Plan(layers=(LayerPlan(),)), profile).step_s
    assert simulate(
        Plan(layers=(LayerPlan(),), has_block_loss=True), profile
    ).step_s == pytest.approx(plain + 0.3)


@given(
    rate=st.floats(1e6, 1e10),
    num_layers=st.integers(1, 9),
    buffers=st.integers(1, 4),
    sending=st.integers(1, 4),
    kept=st.integers(0, 9),
)
def test_no_replay_is_faster_than_its_compute_or_its_copies(
    rate, num_layers, buffers, sending, kept
):
    kept = min(kept, num_layers)
    layers = (STORE_ALL,) * (num_layers - kept) + (LayerPlan(),) * kept
    plan = Plan(layers=layers, num_buffers=buffers, max_sending=sending)
    found = simulate(plan, step_profile(rate=rate, num_layers=num_layers))
    copies = (num_layers - kept) * 9 * UNIT / rate
    compute = num_layers * 1.5 + (num_layers - kept) * 0.05 + 0.1
    assert found.step_s >= max(compute, copies) - 1e-9
    assert found.step_s <= compute + 2 * copies + 1e-9
    if kept < num_layers:  # out and back never overlap for one layer
        assert found.step_s >= 2 * 9 * UNIT / rate - 1e-9


def test_a_plan_that_stores_needs_a_store():
    with pytest.raises(ConfigError, match="expected a profile with a store"):
        simulate(Plan(layers=(STORE_ALL,)), step_profile())
