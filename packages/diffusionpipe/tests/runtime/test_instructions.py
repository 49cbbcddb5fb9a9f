"""Messages follow from names and rows; orders that cannot run are refused before anything runs."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.planner.plan import Action
from diffusionpipe.planner.traffic import join_ranges
from diffusionpipe.runtime.instructions import (
    BackboneFlow,
    Dataflow,
    compile_programs,
    scale_rows,
)
from shared.errors import ConfigError

from .toy import BATCH, NUM_LAYERS, PLANS, make_model, make_plan

FEEDS = {"sample": ("z",), "text": ("text",), "target": ("z",)}


def make_flow(differentiable=None):
    layers = make_model().list_layers()
    written = {key for layer in layers for key in layer.writes}
    backbone = BackboneFlow(
        reads=tuple(layer.reads for layer in layers),
        writes=tuple(layer.writes for layer in layers),
        feeds=FEEDS,
        differentiable=frozenset(written if differentiable is None else differentiable),
    )
    return Dataflow(backbones=(backbone,), components={"z": ("z",), "text": ("text",)})


def list_messages(programs):
    """Each message once, from its sender's program."""
    return [m for program in programs for m in program.messages if m.sender == program.rank]


@pytest.mark.parametrize("name", PLANS)
def test_every_value_reaches_every_reading_rank_once(name):
    """Brute force over layers, samples and ranks: who needs what that another rank computes."""
    plan, flow = PLANS[name](), make_flow()
    (names,) = flow.backbones
    stage_of = [v for v, (first, stop) in enumerate(plan.spans) for _ in range(first, stop)]
    holder = {  # by stage and row, the rank that computes it
        (stage, row): rank
        for stage, ranks in enumerate(plan.devices)
        for m in range(plan.num_micro_batches)
        for rank in ranks
        for row in plan.samples(stage, m, rank)
    }
    writer = {key: stage_of[i] for i, keys in enumerate(names.writes) for key in keys}
    expected = set()
    for layer, keys in enumerate(names.reads):
        for key in keys:
            for row in range(BATCH) if key in writer else ():
                ends = holder[writer[key], row], holder[stage_of[layer], row]
                if ends[0] != ends[1]:
                    expected.add((key, row, *ends))
    got = Counter(
        (key, row, m.sender, m.receiver)
        for m in list_messages(compile_programs(plan, flow))
        if m.kind == "values"
        for key in m.keys
        for rows in m.ranges
        for row in range(*rows)
    )
    assert set(got) == expected
    assert set(got.values()) <= {1}
    back = {
        (key, row, m.receiver, m.sender)
        for m in list_messages(compile_programs(plan, flow))
        if m.kind == "gradients"
        for key in m.keys
        for rows in m.ranges
        for row in range(*rows)
    }
    assert back == expected


@pytest.mark.parametrize("name", PLANS)
def test_frozen_outputs_go_to_the_ranks_whose_inputs_depend_on_them(name):
    plan, flow = PLANS[name](), make_flow()
    needed = set()
    for stage, (first, stop) in enumerate(plan.spans):
        keys = {key for layer in flow.backbones[0].reads[first:stop] for key in layer}
        keys |= {"target"} if stop == NUM_LAYERS else set()
        for m in range(plan.num_micro_batches):
            for rank in plan.devices[stage]:
                for key in keys & set(FEEDS):
                    for row in plan.samples(stage, m, rank):
                        needed.add((FEEDS[key][0], row, rank))
    owner = {
        (action.name, row): rank
        for rank, order in enumerate(plan.order)
        for action in order
        if action.kind == "encode"
        for row in range(*action.samples)
    }
    got = Counter(
        (key, row, m.receiver)
        for m in list_messages(compile_programs(plan, flow))
        if m.kind == "frozen"
        for key in m.keys
        for rows in m.ranges
        for row in range(*rows)
    )
    assert set(got) == {(k, row, rank) for k, row, rank in needed if owner[k, row] != rank}
    assert set(got.values()) <= {1}


@pytest.mark.parametrize("name", PLANS)
def test_lanes_keep_the_senders_order_and_receivers_need_them_in_time(name):
    programs = compile_programs(PLANS[name](), make_flow())
    for program in programs:
        positions = {each.action: index for index, each in enumerate(program.instructions)}
        sent = [positions[m.sent_by] for m in program.messages if m.sender == program.rank]
        assert sent == sorted(sent)
    numbers = [m.number for m in sorted(list_messages(programs), key=lambda m: m.number)]
    assert numbers == list(range(len(numbers)))


def test_values_without_gradients_send_none_back():
    programs = compile_programs(PLANS["chain of 2"](), make_flow(differentiable=["h3"]))
    keys = {m.kind: set(m.keys) for m in list_messages(programs)}
    assert keys["gradients"] == {"h3"}
    assert keys["values"] == {"h0", "h1", "h2", "h3", "emb"}
    none = compile_programs(PLANS["chain of 2"](), make_flow(differentiable=[]))
    assert "gradients" not in {m.kind for m in list_messages(none)}


def test_folded_skips_do_not_travel():
    chain = list_messages(compile_programs(make_plan("chain", [[0], [1]], 2), make_flow()))
    folded = list_messages(compile_programs(make_plan("folded", [[0], [1]], 2), make_flow()))
    assert {key for m in chain if m.kind == "values" for key in m.keys} >= {"h0", "h1", "h2"}
    between = [(m.stages, m.keys) for m in folded if m.kind == "values"]
    assert set(between) == {((0, 1), ("emb", "h2")), ((1, 2), ("u0",))}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_scaled_rows_stay_a_partition(batch_size, data):
    num_rows = data.draw(st.integers(1, batch_size))
    ends = sorted(data.draw(st.sets(st.integers(1, batch_size)))) or [batch_size]
    ranges = list(zip([0, *ends], [*ends, batch_size], strict=True))
    scaled = [scale_rows(rows, batch_size, num_rows) for rows in ranges]
    assert [row for rows in scaled for row in range(*rows)] == list(range(num_rows))


@given(st.sets(st.tuples(st.integers(0, 20), st.integers(1, 5))))
def test_joined_ranges_hold_the_same_rows(pairs):
    ranges = {(first, first + count) for first, count in pairs}
    joined = join_ranges(ranges)
    rows = [row for first, stop in joined for row in range(first, stop)]
    assert rows == sorted({row for first, stop in ranges for row in range(first, stop)})
    assert all(left[1] < right[0] for left, right in pairwise(joined))


def change(plan, rank, edit):
    """The plan with a rank's order edited in place."""
    actions = list(plan.order[rank])
    edit(actions)
    order = [tuple(actions) if r == rank else own for r, own in enumerate(plan.order)]
    return replace(plan, order=tuple(order))


def test_orders_whose_ranks_wait_for_each_other_are_refused():
    plan = make_plan("folded", [[0], [1]], 1)

    def edit(actions):
        last = actions.index(Action("backward", 2, 0))
        actions.insert(last + 1, actions.pop(last))
        first = actions.index(Action("backward", 0, 0))
        actions[first], actions[last] = actions[last], actions[first]
        actions[:] = [a for a in actions if a.kind != "encode"] + [
            a for a in actions if a.kind == "encode"
        ]
        actions.append(actions.pop(actions.index(Action("step"))))

    with pytest.raises(
        ConfigError, match=r"no ranks wait for each other, got rank 0 at .*, rank 1 at"
    ):
        compile_programs(change(plan, 0, edit), make_flow())


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda a: a.remove(Action("forward", 0, 1)), r"got 0 x forward of stage 0, micro-batch 1"),
        (
            lambda a: a.remove(Action("backward", 0, 1)),
            r"got 0 x backward of stage 0, micro-batch 1",
        ),
        (lambda a: a.insert(0, Action("forward", 0, 1)), r"got 2 x forward of stage 0"),
        (lambda a: a.insert(0, Action("forward", 1, 1)), r"got 1 x forward of stage 1"),
        (lambda a: a.insert(0, Action("backward", 0, 1)), r"got 2 x backward of stage 0"),
        (lambda a: a.clear(), r"got 0 x forward of stage 0"),
        (
            lambda a: a.remove(Action("encode", name="z", samples=(2, 3))),
            r"each of 12 samples encoded once by z",
        ),
        (
            lambda a: a.insert(0, Action("encode", name="z", samples=(2, 3))),
            r"each of 12 samples encoded once by z",
        ),
    ],
)
def test_orders_that_leave_out_or_repeat_something_are_refused(edit, told):
    with pytest.raises(ConfigError, match=told):
        compile_programs(change(PLANS["chain of 2"](), 0, edit), make_flow())
