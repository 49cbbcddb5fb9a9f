"""Static lists: data flow, in-flight counts, no deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.planner.plan import Action
from diffusionpipe.planner.schedule import (
    count_in_flight,
    list_orders_by_events,
    order_1f1b,
    order_opposite,
)


def check_complete(order, num_stages, num_micro_batches):
    actions = [action for own in order for action in own]
    expected = {
        (kind, stage, m)
        for kind in ("forward", "backward")
        for stage in range(num_stages)
        for m in range(num_micro_batches)
    }
    assert len(actions) == len(expected)
    assert {action[:3] for action in actions} == expected


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_is_complete_and_keeps_few_in_flight(execute, stages, micro_batches):
    order = order_1f1b(stages, micro_batches)
    check_complete(order, stages, micro_batches)
    execute(order, [stages])
    in_flight = count_in_flight(order)
    assert in_flight == {s: min(stages - s, micro_batches) for s in range(stages)}


def test_1f1b_by_hand():
    names = [
        " ".join(f"{action.kind[0].upper()}{action.micro_batch}" for action in own)
        for own in order_1f1b(2, 3)
    ]
    assert names == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


seconds = st.floats(0.1, 4).map(lambda value: round(value, 2))


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_folded_lists_run_on_their_devices(execute, devices, micro_batches, data):
    stages = 2 * devices - 1
    passes = st.lists(seconds, min_size=stages, max_size=stages)
    forward, backward = data.draw(passes), data.draw(passes)
    estimate = data.draw(st.booleans())
    device_of = [min(v, stages - 1 - v) for v in range(stages)]
    order = next(
        list_orders_by_events(device_of, forward, backward, micro_batches, has_estimate=estimate)
    )
    estimates = [each[:3] for own in order for each in own if each.kind == "estimate"]
    assert len(set(estimates)) == len(estimates) == estimate * stages * micro_batches
    order = [[each for each in own if each.kind != "estimate"] for own in order]
    assert len(order) == devices
    check_complete(order, stages, micro_batches)
    execute(order, [stages])
    for device, own in enumerate(order):
        assert {action.stage for action in own} == {device, stages - 1 - device}


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_opposite_lists_run_on_their_devices(execute, devices, micro_batches, data):
    passes = st.lists(st.tuples(seconds, seconds), min_size=devices, max_size=devices)
    order = order_opposite(data.draw(passes), data.draw(passes), micro_batches)
    check_complete(order, 2 * devices, micro_batches)
    execute(order, [devices, devices])
    for device, own in enumerate(order):
        assert {action.stage for action in own} == {device, devices + devices - 1 - device}
    for stage, count in count_in_flight(order).items():
        assert count <= min(devices - stage % devices, micro_batches)


def test_the_interpreter_finds_a_deadlock(execute):
    # Stage 0 waits for a gradient before it has sent what the next stage needs.
    broken = ((Action("forward", 0, 0), Action("backward", 0, 0)), (Action("backward", 1, 0),))
    with pytest.raises(AssertionError, match="all devices wait"):
        execute(broken, [2])


def test_folded_lists_by_hand():
    # Spans 0 and 2 on device 0; a second a pass. At 3 device 0 may go on with either micro-batch, at 5
    # too: it takes the pass that is farther along.
    order, least = list_orders_by_events([0, 1, 0], [1.0] * 3, [1.0] * 3, 2)
    names = [
        " ".join(f"{each.kind[0].upper()}{each.stage}.{each.micro_batch}" for each in own)
        for own in order
    ]
    assert names == ["F0.0 F0.1 F2.0 B2.0 F2.1 B0.0 B2.1 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert count_in_flight(order) == {0: 2, 1: 2, 2: 1}
    # The last of all orders has one in flight.
    assert set(count_in_flight(least).values()) == {1}
